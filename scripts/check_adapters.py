#!/usr/bin/env python3
"""Do adapters that `fsdp train` exports give the same loss in PEFT as in `fsdp eval`?

usage: python scripts/check_adapters.py FSDP [CASE ..]      (torch 2.11, transformers 5.17, peft 0.21)

For each folder of `tests/golden/families` and the Llama and GPT-2 beside it (or those that are named), with LoRA and with DoRA: `fsdp
train` trains adapters of all linear maps, but of mixtures only those of attention; PEFT loads what was exported onto the base in
transformers, and computes the loss of one batch. FSDP is the built program.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from check_models import GOLDEN, TOLERANCE

BESIDE = ["llama-gqa", "llama-tied", "gpt2"]


def ours(fsdp, folder, base, dora):
    """Trains adapters, and returns the loss with them and the one of the base."""
    # Tied parameters must be in one unit.
    is_tied = json.loads((base / "config.json").read_text()).get("tie_word_embeddings", base.name.startswith("gpt2"))
    # PEFT 0.21 takes adapters called `gate_proj`, `up_proj` or `down_proj` for those of experts, if a model has any.
    weights = load_file(base / "model.safetensors")
    targets = "all-linear"
    if any(".experts." in name for name in weights):
        targets = sorted({name.split(".")[-2] for name, weight in weights.items() if "attn" in name and weight.dim() == 2})
    file = folder / "run.toml"
    file.write_text(
        f"""
        model = {{ path = "{base}", init = "pretrained" }}
        adapter = {{ rank = 2, alpha = 6, dora = {str(dora).lower()}, target_modules = {json.dumps(targets)} }}
        train = {{ steps = 3, micro_batch_size = 1, global_batch_size = 4, optimizer = {{ name = "adamw", lr = 0.05 }} }}
        run = {{ ranks = 2, out_dir = "{folder / 'out'}" }}
        fsdp = {{ min_num_params = {1_000_000 if is_tied else 500} }}
        [data]
        train = ["{folder / 'data'}"]
        eval = ["{folder / 'data'}"]
        format = "tokens-u16"
        packing = "documents"
        seq_len = 12
        shuffle = false
        """
    )

    def run(*args):
        done = subprocess.run([fsdp, *args], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"fsdp {args[0]}: {done.stderr}")
        return done.stdout

    run("train", file)
    models = [folder / "out/adapter", base]
    return [json.loads(run("eval", file, "--model", model, "--json"))["evaluations"][0]["loss"] for model in models]


def theirs(folder, base, ids):
    """The loss with PEFT, which must take all tensors."""
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32)
    model = PeftModel.from_pretrained(model, folder / "out/adapter").eval()
    taken = sum(".lora_" in name for name, _ in model.named_parameters())
    exported = len(load_file(folder / "out/adapter/adapter_model.safetensors"))
    if taken != exported:
        sys.exit(f"{base.name}: PEFT has {taken} tensors, the export {exported}")
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits.double()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fsdp")
    parser.add_argument("cases", nargs="*")
    arguments = parser.parse_args()
    cases = arguments.cases or BESIDE + sorted(folder.name for folder in GOLDEN.iterdir())
    for case, dora in ((case, dora) for case in cases for dora in (False, True)):
        base = GOLDEN.parent / case if case in BESIDE else GOLDEN / case
        ids = load_file(base / "expected.safetensors")["ids"]
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "data").mkdir()
            for row, tokens in enumerate(ids):
                (folder / f"data/{row}.bin").write_bytes(tokens.numpy().astype("<u2").tobytes())
            (adapted, plain), peft = ours(arguments.fsdp, folder, base, dora), theirs(folder, base, ids)
        difference, kind = abs(adapted - peft) / peft, "DoRA" if dora else "LoRA"
        print(
            f"{case}, {kind}: fsdp {adapted:.9f} (base {plain:.3f}), PEFT {peft:.9f}, relative difference {difference:.1e}",
            flush=True,
        )
        if not difference <= TOLERANCE:
            sys.exit("they differ")


if __name__ == "__main__":
    main()
