#!/usr/bin/env python3
"""Compares fsdp (tools/gpu-bench) with PyTorch FSDP2, eager and compiled, on one GPU.

    bench/gpu/compare.py --python PATH/TO/python [--fsdp target/release/fsdp-gpu-bench] [--models gpt2-124m,llama-1.2b]
                         [--runs 3] [--steps 30] [--device cuda] [--json FILE]

`--python` is an interpreter with torch 2.11, and triton for the compiled peer on a GPU. The programs run alternately.
Printed are medians over the runs: tokens/s, model TFLOP/s (6N + 12 L d T per token), the peak that each program reserved on
the device, ratios to ours (above 1 means that fsdp is faster, or needs less memory), and the loss of the first step, which
is about that of a uniform guess in all programs; then, which aims are met: 1.0x of the compiled peer and 1.15x of the eager
one, no more memory than either, and a host that issues a step in a quarter of its time. The exit code is 1 if a program
failed; what the others did is printed all the same.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
GIB = 1 << 30
# Targets for tokens/s, as multiples of the peers'.
SPEEDS = {"eager": 1.15, "compiled": 1.0}
# The figures kept for every program; only fsdp has issue times.
FIGURES = (
    "tokens_per_s", "tflops", "peak_bytes", "device_used_bytes", "loss_first", "step_ms_mean", "issue_ms_median",
)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="a Python interpreter that has torch")
    parser.add_argument("--fsdp", default=str(HERE.parent.parent / "target/release/fsdp-gpu-bench"),
                        help="the program of tools/gpu-bench")
    parser.add_argument("--models", default="gpt2-124m,llama-1.2b", help="names that both programs know")
    parser.add_argument("--runs", type=int, default=3, help="runs of each program and model")
    parser.add_argument("--steps", type=int, default=30, help="steps of a run, a third of them warm-up")
    parser.add_argument("--device", default="cuda", help="cuda, or torch-cpu to try this without a GPU")
    parser.add_argument("--json", help="also write all figures to this file")
    return parser.parse_args()


def result_of(command):
    """Runs a program and returns the JSON object that it prints, or nothing if it failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    start = done.stdout.find("{")
    try:
        if done.returncode == 0 and start >= 0:
            return json.JSONDecoder().raw_decode(done.stdout[start:])[0]
    except json.JSONDecodeError as error:
        print(error, file=sys.stderr)
    print(f"{' '.join(command)}: exit code {done.returncode}, no result\n{done.stderr}", file=sys.stderr)
    return None


def commands(args, model):
    common = ["--model", model, "--steps", str(args.steps), "--warmup", str(args.steps // 3)]
    launcher = [args.python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    peer = [*launcher, str(HERE / "fsdp2_peer.py"), *common, "--device", "cuda" if args.device == "cuda" else "cpu"]
    return {
        "fsdp": [args.fsdp, "--json", "--device", args.device, *common],
        "eager": peer,
        "compiled": [*peer, "--compile"],
    }


def measure(args, model):
    """All runs of one model, the programs alternating."""
    runs = {name: [] for name in commands(args, model)}
    for _ in range(args.runs):
        for name, command in commands(args, model).items():
            runs[name].append(result_of(command))
    case = {"model": model, "runs": runs}
    for name, results in runs.items():
        if all(results):
            case[name] = {
                key: statistics.median(result.get(key) or 0 for result in results)
                for key in FIGURES
            }
    case["aims"] = aims(case)
    return case


def aims(case):
    """Which aims are met; those of programs that failed are missing."""
    ours, found = case.get("fsdp"), {}
    for name, speed in SPEEDS.items():
        if ours and name in case:
            found[f"{speed}x of {name}"] = ours["tokens_per_s"] >= speed * case[name]["tokens_per_s"]
            if ours["peak_bytes"]:
                found[f"memory of {name}"] = ours["peak_bytes"] <= case[name]["peak_bytes"]
    # On the host, issuing an operation completes it.
    if ours and ours["peak_bytes"]:
        found["issued in a quarter of a step"] = ours["issue_ms_median"] <= ours["step_ms_mean"] / 4
    return found


def show(case):
    ours = case.get("fsdp")
    for name in case["runs"]:
        found = case.get(name)
        if not found:
            print(f"{case['model']:>12} {name:>9} failed", flush=True)
            continue
        speed = ours["tokens_per_s"] / found["tokens_per_s"] if ours else float("nan")
        memory = found["peak_bytes"] / ours["peak_bytes"] if ours and ours["peak_bytes"] else float("nan")
        print(
            f"{case['model']:>12} {name:>9} {found['tokens_per_s']:>12,.0f} {found['tflops']:>9.1f}"
            f" {speed:>7.2f}x {found['peak_bytes'] / GIB:>9.2f} {found['device_used_bytes'] / GIB:>9.2f}"
            f" {memory:>7.2f}x {found['loss_first']:>6.2f}",
            flush=True,
        )
    for aim, met in case["aims"].items():
        print(f"{case['model']:>12} {'met' if met else 'NOT MET':>9} {aim}", flush=True)


def main():
    args = arguments()
    columns = ("model", "program", "tokens/s", "TFLOP/s", "ratio", "peak GiB", "card GiB", "ratio", "loss")
    print("{:>12} {:>9} {:>12} {:>9} {:>8} {:>9} {:>9} {:>8} {:>6}".format(*columns))
    cases = []
    for model in args.models.split(","):
        cases.append(measure(args, model))
        show(cases[-1])
        if args.json:
            Path(args.json).write_text(json.dumps({"cases": cases}, indent=2) + "\n")
    return 0 if all(all(results) for case in cases for results in case["runs"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
