#!/usr/bin/env python3
"""What saving costs a run: `fsdp train` without checkpoints, saving behind the steps, and saving between them.

    bench/saving.py [--fsdp target/release/fsdp] [--runs 3] [--steps 100] [--every 25] [--ranks 2] [--json FILE]

The model is the Llama of 5.9 million parameters of bench/README.md (its state: 71 MB). The three programs run
alternately. Time is that of the steps and what lies between them: from the line of the first step in
metrics.jsonl to the last save. Printed are medians over the runs, and what a save adds to each step between two saves.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
RUN = """
[model]
path = "{dir}/model"
[data]
train = ["{dir}/tokens.bin"]
format = "tokens-u16"
seq_len = 256
[train]
steps = {steps}
micro_batch_size = {micro_batch}
global_batch_size = 8
optimizer = {{ name = "adamw", lr = 1e-3 }}
lr_schedule = {{ name = "constant" }}
[fsdp]
wrap = ["LlamaDecoderLayer"]
[run]
ranks = {ranks}
out_dir = "{dir}/out"
"""
MODES = {
    "no checkpoints": ["checkpoint.every=0"],
    "behind the steps": ["checkpoint.every={every}", "checkpoint.async=true"],
    "between the steps": ["checkpoint.every={every}", "checkpoint.async=false"],
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsdp", default=str(HERE.parent / "target/release/fsdp"), help="the fsdp binary")
    parser.add_argument("--runs", type=int, default=3, help="runs of each mode")
    parser.add_argument("--steps", type=int, default=100, help="steps of a run")
    parser.add_argument("--every", type=int, default=25, help="steps between saves")
    parser.add_argument("--ranks", type=int, default=2, help="ranks")
    parser.add_argument("--json", help="also write all figures to this file")
    return parser.parse_args()


def prepare(args, folder):
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(CONFIG))
    tokens = bytearray()
    state = 1
    for _ in range(8 * 257 * 20):
        state = (state * 1103515245 + 12345) % 2**31
        tokens += (state // 65536 % 4096).to_bytes(2, "little")
    (folder / "tokens.bin").write_bytes(tokens)
    text = RUN.format(dir=folder, steps=args.steps, ranks=args.ranks, micro_batch=8 // args.ranks)
    (folder / "run.toml").write_text(text)


def seconds(args, folder, settings):
    """Wall seconds from the end of the first step to the end of the last one, saves included."""
    command = [args.fsdp, "train", str(folder / "run.toml"), "--overwrite"]
    for setting in settings:
        command += ["--set", setting.format(every=args.every)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    first = last = None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.lstrip().startswith("step"):
            first = first or time.monotonic()
        if line.lstrip().startswith(("step", "checkpoint after")):
            last = time.monotonic()
    if process.wait() != 0:
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}\n{''.join(lines)}")
    return last - first


def main():
    args = arguments()
    times = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(args, folder)
        for _ in range(args.runs):
            for mode, settings in MODES.items():
                times[mode].append(seconds(args, folder, settings))
    steps = args.steps - 1
    base = statistics.median(times["no checkpoints"])
    figures = {}
    print(f"{'':20}{'ms per step':>12}{'added':>9}")
    for mode, values in times.items():
        median = statistics.median(values)
        figures[mode] = {"ms_per_step": median / steps * 1e3, "added": median / base - 1, "seconds": values}
        print(f"{mode:20}{median / steps * 1e3:12.1f}{median / base - 1:9.1%}")
    if args.json:
        Path(args.json).write_text(json.dumps({"arguments": vars(args), "modes": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
