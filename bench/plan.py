#!/usr/bin/env python3
"""Compares what `fsdp plan` says of this machine with what `fsdp bench train` measures on it.

    bench/plan.py [--fsdp target/release/fsdp] [--calibration FILE] [--steps 7] [--rounds 1] [--json FILE]
                  [--models quarter,base,double,eightfold] [--worlds 1,2,4] [--load FILE]

Without --calibration, `fsdp calibrate` runs first. Every case (model, element type, checkpointing, ranks, threads or
processes) is one run of a few steps, of which the median counts. Printed are the errors of predictions, and of all
pairs of settings of one model that are more than 5 % apart how many are predicted in the right order. With --load,
measured times are taken from the JSON of an earlier run instead of measuring again.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent

# Names give the number of parameters relative to the model of bench/compare.py, which has 5.9 million.
MODELS = {
    "quarter": {"hidden": 128, "layers": 4, "heads": 4, "kv-heads": 2, "ffn": 512, "vocab": 2048, "seq": 256, "batch": 8},
    "base": {"hidden": 256, "layers": 4, "heads": 8, "kv-heads": 2, "ffn": 1024, "vocab": 4096, "seq": 256, "batch": 8},
    "double": {"hidden": 384, "layers": 4, "heads": 6, "kv-heads": 2, "ffn": 1408, "vocab": 6144, "seq": 256, "batch": 8},
    "eightfold": {"hidden": 640, "layers": 7, "heads": 10, "kv-heads": 2, "ffn": 2560, "vocab": 8192, "seq": 256, "batch": 4},
}

# Pairs whose ratio is below this count as equal.
APART = 1.05


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsdp", default=str(HERE.parent / "target/release/fsdp"), help="the fsdp binary")
    parser.add_argument("--calibration", help="a file of `fsdp calibrate` on this machine")
    parser.add_argument("--steps", type=int, default=7, help="steps of a run, two of which do not count")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each case, one round of all cases after the other")
    parser.add_argument("--models", default=",".join(MODELS), help="which models")
    parser.add_argument("--worlds", default="1,2,4", help="world sizes")
    parser.add_argument("--load", help="measured times of an earlier run")
    parser.add_argument("--json", help="write all figures to this file")
    return parser.parse_args()


def result_of(command):
    """Runs a program and returns the JSON object that it prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    start = done.stdout.find("{")
    if done.returncode != 0 or start < 0:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return json.JSONDecoder().raw_decode(done.stdout[start:])[0]


def cases(args):
    worlds = [int(world) for world in args.worlds.split(",")]
    for model, dtype, checkpointing, world in itertools.product(
        args.models.split(","), ["f32", "bf16"], ["none", "full"], worlds
    ):
        for how in ["threads"] if world == 1 else ["threads", "processes"]:
            yield {"model": model, "dtype": dtype, "checkpointing": checkpointing, "world": world, "how": how}


def measured(args, case):
    """Seconds of a step."""
    sizes = MODELS[case["model"]]
    options = [f"--{key}={value}" for key, value in sizes.items() if key != "batch"]
    options += [f"--global-batch={sizes['batch']}", f"--ranks={case['world']}", f"--param-dtype={case['dtype']}"]
    options += [f"--steps={args.steps}", "--warmup=2", "--json"]
    options += ["--checkpointing"] if case["checkpointing"] == "full" else []
    launcher = ["launch", "--nproc", str(case["world"]), "--"] if case["how"] == "processes" else []
    return result_of([args.fsdp, *launcher, "bench", "train", *options])["step_ms_median"] / 1e3


def predicted(args, case, folder):
    """Seconds of a step."""
    sizes = MODELS[case["model"]]
    config = {
        "model_type": "llama", "vocab_size": sizes["vocab"], "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["ffn"], "num_hidden_layers": sizes["layers"], "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv-heads"], "max_position_embeddings": sizes["seq"], "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    run = folder / "run.toml"
    run.write_text(f"""
[model]
path = "{folder}"
[data]
train = ["none"]
format = "tokens-u32"
seq_len = {sizes["seq"]}
[train]
steps = 10
micro_batch_size = {sizes["batch"] // case["world"]}
global_batch_size = {sizes["batch"]}
grad_clip = 1.0
optimizer = {{ name = "adamw", lr = 1e-3, betas = [0.9, 0.99], weight_decay = 0.1 }}
[fsdp]
wrap = ["LlamaDecoderLayer"]
param_dtype = "{case["dtype"]}"
activation_checkpointing = "{case["checkpointing"]}"
[run]
ranks = {case["world"]}
transport = "{"tcp" if case["how"] == "processes" else "auto"}"
out_dir = "unused"
""")
    plan = result_of([args.fsdp, "plan", str(run), "--cluster", args.calibration, "--json"])
    return plan["step"]["seconds"]


def order(cases):
    """Of pairs of settings of one model that are apart: how many are predicted in the right order, and how many there are."""
    right = pairs = 0
    for one, other in itertools.combinations(cases, 2):
        apart = one["measured_s"] / other["measured_s"]
        if one["model"] != other["model"] or 1 / APART < apart < APART:
            continue
        pairs += 1
        right += (one["predicted_s"] > other["predicted_s"]) == (apart > 1)
    return right, pairs


def show(cases):
    def line(name, of):
        errors = sorted(abs(case["predicted_s"] / case["measured_s"] - 1) for case in of)
        bias = statistics.mean(case["predicted_s"] / case["measured_s"] - 1 for case in of)
        worst = errors[-1]
        print(
            f"| {name} | {len(of)} | {statistics.mean(errors):.1%} | {statistics.median(errors):.1%} | {worst:.1%} | "
            f"{bias:+.1%} |"
        )

    print("| of | runs | mean error | median | worst | bias |\n|---|---|---|---|---|---|")
    line("all", cases)
    for key in ["model", "dtype", "checkpointing", "world", "how"]:
        for value in dict.fromkeys(case[key] for case in cases):
            line(f"{key} {value}", [case for case in cases if case[key] == value])
    right, pairs = order(cases)
    print(f"\norder right in {right} of {pairs} pairs more than 5 % apart ({right / max(pairs, 1):.1%})")


def main():
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        if args.calibration is None:
            args.calibration = str(folder / "calibration.toml")
            subprocess.run([args.fsdp, "calibrate", "--out", args.calibration], check=True)
        if args.load:
            all_cases = json.loads(Path(args.load).read_text())["cases"]
        else:
            all_cases = list(cases(args))
            times = [[] for _ in all_cases]
            for _ in range(args.rounds):
                for case, seconds in zip(all_cases, times):
                    seconds.append(measured(args, case))
                    print(*case.values(), f"{seconds[-1] * 1e3:.1f} ms", file=sys.stderr)
            for case, seconds in zip(all_cases, times):
                case["measured_s"] = statistics.median(seconds)
        for case in all_cases:
            case["predicted_s"] = predicted(args, case, folder)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores\n")
    show(all_cases)
    if args.json:
        Path(args.json).write_text(json.dumps({"cases": all_cases}, indent=1))


if __name__ == "__main__":
    main()
