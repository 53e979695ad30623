#!/usr/bin/env python3
"""Load an exported model in transformers and compare its loss with the one that `fsdp` computed.

usage: python check_export.py MODEL RUN [--adapter DIR] [--tolerance 1e-5]      (torch, transformers, peft, Python 3.11)

MODEL is the `model` folder of a finished run. RUN is the output folder of a second run of one or more steps that
started from it: `model.init = "pretrained"`, `data.shuffle = false`, one data file, packing "stream". The loss of
its first step is that of MODEL on the first global batch, which is computed here again from `resolved.toml` and the
data alone. With an adapter, MODEL is its base, and RUN started from both (`adapter.path`). Run it in the directory in which RUN was started, because data paths are relative.
"""

import argparse
import json
import os
import sys
import tomllib

import numpy
import torch
from transformers import AutoModelForCausalLM

WIDTHS = {"text": "u1", "tokens-u16": "<u2", "tokens-u32": "<u4"}


def first_batch(config):
    """Inputs and targets of the first global batch: sample i is tokens [i T, i T + T], shared at the ends."""
    data = config["data"]
    if data["shuffle"] or data["packing"] != "stream" or len(data["train"]) != 1:
        sys.exit("RUN must have data.shuffle = false, packing \"stream\" and one file in data.train")
    if data["format"] not in WIDTHS or (data["format"] == "text" and data["tokenizer"] != "bytes"):
        sys.exit("RUN must have tokens, or text with tokenizer \"bytes\"")
    count, length = config["train"]["global_batch_size"], data["seq_len"]
    tokens = numpy.fromfile(data["train"][0], dtype=WIDTHS[data["format"]], count=count * length + 1)
    ids = torch.from_numpy(tokens.astype("int64"))
    return ids[:-1].reshape(count, length), ids[1:].reshape(count, length)


def loss_of(model, inputs, targets):
    """The mean cross-entropy over all targets, a sample at a time."""
    total = 0.0
    with torch.no_grad():
        for ids, wanted in zip(inputs, targets):
            logits = model(ids[None]).logits[0].double()
            total += torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
    return total / targets.numel()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("run")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="of the relative difference")
    parser.add_argument("--adapter", help="an adapter of the model, as PEFT keeps it")
    arguments = parser.parse_args()
    with open(os.path.join(arguments.run, "resolved.toml"), "rb") as file:
        config = tomllib.load(file)
    with open(os.path.join(arguments.run, "metrics.jsonl")) as file:
        # A line without a loss is that of a start or of an evaluation.
        ours = next(line["loss"] for line in map(json.loads, file) if "loss" in line)
    model, info = AutoModelForCausalLM.from_pretrained(arguments.model, output_loading_info=True)
    wrong = {kind: sorted(names) for kind, names in info.items() if names}
    if wrong:
        sys.exit(f"transformers does not take all tensors: {wrong}")
    if arguments.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, arguments.adapter)
    theirs = loss_of(model.eval(), *first_batch(config))
    difference = abs(ours - theirs) / abs(theirs)
    print(f"loss: fsdp {ours:.9f}, transformers {theirs:.9f}, relative difference {difference:.1e}")
    if not difference <= arguments.tolerance:
        sys.exit("the losses differ")


if __name__ == "__main__":
    main()
