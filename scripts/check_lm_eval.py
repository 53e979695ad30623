#!/usr/bin/env python3
"""Trains a real model for some steps, and compares what lm_eval and transformers make of its export with `fsdp eval` and `fsdp generate`.

usage: python scripts/check_lm_eval.py FSDP [--peft]
       (lm_eval 0.4.13, and what check_real_model.py needs)

The model is the first four layers of SmolLM2-135M-Instruct; the data are paragraphs of the documentation. `lm_eval` computes the loss of
a local task, in float32 on the CPU. With `--peft` adapters are trained, and lm_eval loads them onto the base. Exits with 1 if the losses
are more than 1e-6 apart, or if greedy generation gives other tokens.
"""

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")

from check_real_model import write_model  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
PROMPT, NEW_TOKENS = "The first rank", 12

RUN = """
model = { path = "base", init = "pretrained" }
fsdp = { wrap = ["LlamaDecoderLayer"] }
run = { ranks = 2, out_dir = "run" }
train = { steps = 4, micro_batch_size = 2, global_batch_size = 4, optimizer = { name = "adamw", lr = 1e-4 } }
[data]
train = ["train.jsonl"]
eval = ["held-out.jsonl"]
tokenizer = "base/tokenizer.json"
packing = "documents"
seq_len = 1024
# lm_eval puts this token before each text, and nothing after it.
bos = "<|im_start|>"
eos = "none"
"""
TASK = """
task: held_out
dataset_path: json
dataset_kwargs: { data_files: { test: held-out.jsonl } }
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{ metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false }]
"""


def paragraphs(page, file):
    """Writes the longer paragraphs of a page, and returns their bytes."""
    texts = [text for text in (DOCS / page).read_text().split("\n\n") if len(text) > 300 and text[0] != "|"]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:24]))
    return sum(len(text.encode()) for text in texts[:24])


def loss_of_lm_eval(folder, model):
    """bits per byte"""
    (folder / "held_out.yaml").write_text(TASK)
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", f"{model},dtype=float32"]
    command += ["--tasks", "held_out", "--include_path", ".", "--device", "cpu", "--output_path", "out"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (results,) = folder.glob("out/*/results*.json")
    return json.loads(results.read_text())["results"]["held_out"]["bits_per_byte,none"]


def check(fsdp, folder, peft):
    def run(*arguments):
        return subprocess.run([fsdp, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout

    write_model(folder / "base", 4)
    paragraphs("clusters.md", folder / "train.jsonl")
    size = paragraphs("numerics.md", folder / "held-out.jsonl")
    (folder / "run.toml").write_text(RUN + ("[adapter]\nrank = 4\n" if peft else ""))
    run("train", "run.toml", "--quiet")
    export, model = ("run/adapter", "pretrained=base,peft=run/adapter") if peft else ("run/model", "pretrained=run/model")

    (ours,) = json.loads(run("eval", "run.toml", "--model", export, "--json"))["evaluations"]
    theirs = loss_of_lm_eval(folder, model) * size * math.log(2) / ours["tokens"]
    apart = abs(theirs / ours["loss"] - 1)
    print(f"loss {ours['loss']:.6f} over {ours['tokens']} tokens, lm_eval {apart:.1e} apart")
    if peft:
        return apart <= 1e-6

    tokenizer = AutoTokenizer.from_pretrained(folder / export)
    ids = tokenizer(PROMPT, return_tensors="pt")
    loaded = AutoModelForCausalLM.from_pretrained(folder / export)
    theirs = loaded.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.input_ids.shape[1] :].tolist()
    options = ["--prompt", PROMPT, "--max-new-tokens", str(NEW_TOKENS), "--json"]
    ours = json.loads(run("generate", export, *options))["tokens"]
    print(f"generated {ours}, transformers {theirs}")
    return apart <= 1e-6 and ours == theirs


arguments = argparse.ArgumentParser()
arguments.add_argument("fsdp", type=lambda path: pathlib.Path(path).resolve())
arguments.add_argument("--peft", action="store_true")
options = arguments.parse_args()
with tempfile.TemporaryDirectory() as folder:
    sys.exit(not check(options.fsdp, pathlib.Path(folder), options.peft))
