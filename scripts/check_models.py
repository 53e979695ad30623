#!/usr/bin/env python3
"""Do models of all families go from transformers to `fsdp train`, and back, with the same loss?

usage: python scripts/check_models.py FSDP [CASE ..]      (torch 2.11, transformers 5.17)

For each folder of `tests/golden/families` (or those that are named): `fsdp train` takes two steps from its weights and
exports the result; transformers loads that, without a tensor missing or left over, and computes logits and loss on one
batch; a second run that starts from the export says what the loss of that batch is here. FSDP is the built program.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

GOLDEN = pathlib.Path(__file__).parent.parent / "tests/golden/families"
TOLERANCE = 1e-5


def train(fsdp, folder, model, data, steps, out):
    """Runs `fsdp train` over two ranks; returns the loss of the first step."""
    file = folder / f"{out}.toml"
    # Tied parameters stay in one unit.
    is_tied = json.loads((pathlib.Path(model) / "config.json").read_text()).get("tie_word_embeddings", False)
    unit = 1_000_000 if is_tied else 500
    file.write_text(
        f"""
        model = {{ path = "{model}", init = "pretrained" }}
        train = {{ steps = {steps}, micro_batch_size = 1, global_batch_size = 4, optimizer = {{ name = "sgd", lr = 0.1 }} }}
        run = {{ ranks = 2, out_dir = "{folder / out}" }}
        fsdp = {{ min_num_params = {unit} }}
        [data]
        train = ["{data}"]
        format = "tokens-u16"
        packing = "documents"
        seq_len = 12
        shuffle = false
        """
    )
    done = subprocess.run([fsdp, "train", file], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"fsdp train: {done.stderr}")
    with open(folder / out / "metrics.jsonl") as lines:
        return next(line["loss"] for line in map(json.loads, lines) if "step" in line)


def check(fsdp, case):
    """One family, both ways; returns the relative difference of the losses."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        ids = load_file(GOLDEN / case / "expected.safetensors")["ids"]
        data = folder / "data"
        data.mkdir()
        for row, tokens in enumerate(ids):
            (data / f"{row}.bin").write_bytes(tokens.numpy().astype("<u2").tobytes())
        train(fsdp, folder, GOLDEN / case, data, 2, "first")
        exported = folder / "first/model"
        # The default attention of transformers leaves out caps of scores.
        eager = dict(attn_implementation="eager", output_loading_info=True)
        model, info = AutoModelForCausalLM.from_pretrained(exported, **eager)
        wrong = {kind: sorted(names) for kind, names in info.items() if names}
        if wrong:
            sys.exit(f"{case}: transformers does not take all tensors: {wrong}")
        with torch.no_grad():
            logits = model.eval()(ids[:, :-1]).logits.double()
        theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
        ours = train(fsdp, folder, exported, data, 1, "second")
        return ours, theirs


def main():
    fsdp, *cases = sys.argv[1:]
    for case in cases or sorted(folder.name for folder in GOLDEN.iterdir()):
        ours, theirs = check(fsdp, case)
        difference = abs(ours - theirs) / theirs
        print(f"{case}: fsdp {ours:.9f}, transformers {theirs:.9f}, relative difference {difference:.1e}")
        if not difference <= TOLERANCE:
            sys.exit("the losses differ")


if __name__ == "__main__":
    main()
