#!/usr/bin/env python3
"""Do models of all families go from transformers to `fsdp train`, and back, with the same loss?

usage: python scripts/check_models.py FSDP [--logits LOGITS] [CASE ..]      (torch 2.11, transformers 5.17)

For each folder of `tests/golden/families` (or those that are named): `fsdp train` takes two steps from its weights and
exports the result; transformers loads that, without a tensor missing or left over, and computes the loss of one batch; a
second run that starts from the export says what the cross-entropy of that batch is here (of mixtures that balance their
routers, without what that adds). FSDP is the built program. With LOGITS, which is the built example `logits` of fsdp-train, all
logits of the export are compared as well.
"""

import argparse
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
    """Runs `fsdp train` over two ranks; returns the cross-entropy of the first step."""
    file = folder / f"{out}.toml"
    # Tied parameters must be in one unit.
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
        first = next(line for line in map(json.loads, lines) if "step" in line)
        return first.get("cross_entropy", first["loss"])


def largest_difference(program, model, ids, theirs):
    """The largest difference of any logit of the same texts, over the largest logit."""
    done = subprocess.run([program, model], input=json.dumps(ids.tolist()), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"logits: {done.stderr}")
    ours = torch.tensor(json.loads(done.stdout), dtype=torch.float64)
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def check(fsdp, program, case):
    """One family, both ways; returns both losses, and how far logits are apart, if a program says them."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        ids = load_file(GOLDEN / case / "expected.safetensors")["ids"]
        data = folder / "data"
        data.mkdir()
        for row, tokens in enumerate(ids):
            (data / f"{row}.bin").write_bytes(tokens.numpy().astype("<u2").tobytes())
        train(fsdp, folder, GOLDEN / case, data, 2, "first")
        exported = folder / "first/model"
        # The default attention of transformers ignores the softcap of attention scores.
        eager = dict(attn_implementation="eager", output_loading_info=True)
        model, info = AutoModelForCausalLM.from_pretrained(exported, **eager)
        wrong = {kind: sorted(names) for kind, names in info.items() if names}
        if wrong:
            sys.exit(f"{case}: transformers does not take all tensors: {wrong}")
        with torch.no_grad():
            logits = model.eval()(ids[:, :-1]).logits.double()
        theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
        ours = train(fsdp, folder, exported, data, 1, "second")
        if not program:
            return ours, theirs, None
        # Each prefix by itself, since some models use other rotary frequencies for longer texts.
        texts = ids[:, :-1]
        with torch.no_grad():
            behind = [model(texts[:, :end]).logits[:, -1] for end in range(1, texts.shape[1] + 1)]
        apart = largest_difference(program, exported, texts, torch.stack(behind, dim=1).double())
        return ours, theirs, apart


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fsdp")
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--logits", help="the built example `logits` of fsdp-train")
    arguments = parser.parse_args()
    cases = arguments.cases or sorted(folder.name for folder in GOLDEN.iterdir())
    for case in cases:
        ours, theirs, apart = check(arguments.fsdp, arguments.logits, case)
        difference = abs(ours - theirs) / theirs
        told = f"{case}: fsdp {ours:.9f}, transformers {theirs:.9f}, relative difference {difference:.1e}"
        print(told if apart is None else f"{told}; of logits {apart:.1e}", flush=True)
        if not max(difference, apart or 0.0) <= TOLERANCE:
            sys.exit("they differ")


if __name__ == "__main__":
    main()
