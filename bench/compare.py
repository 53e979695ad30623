#!/usr/bin/env python3
"""Compares `fsdp bench train` with PyTorch FSDP2, side by side on one machine.

    bench/compare.py --python PATH/TO/python [--peer SCRIPT] [--fsdp target/release/fsdp]
                     [--runs 3] [--worlds 1,2,4] [--steps 12] [--json FILE]
                     [--device cpu|torch-cpu] [--param-dtype f32|bf16] [--processes]

`--python` is an interpreter with torch; `--peer` a script like bench/fsdp2_peer.py. Both programs run
alternately, so that a machine that slows down slows both. For every world there are two cases: one
micro-batch per rank (8 / world sequences), and micro-batches of 2 sequences at every world. Printed are
medians over the runs, and ratios: above 1 means that fsdp is faster, or needs less memory.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

GLOBAL_BATCH = 8
HERE = Path(__file__).resolve().parent


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="a Python interpreter that has torch")
    parser.add_argument("--peer", default=str(HERE / "fsdp2_peer.py"), help="the peer's script")
    parser.add_argument("--fsdp", default=str(HERE.parent / "target/release/fsdp"), help="the fsdp binary")
    parser.add_argument("--runs", type=int, default=3, help="runs of each program and case")
    parser.add_argument("--worlds", default="1,2,4", help="world sizes")
    parser.add_argument("--steps", type=int, default=12, help="steps of a run")
    parser.add_argument("--device", choices=["cpu", "torch-cpu"], default="cpu", help="what fsdp computes with")
    parser.add_argument("--param-dtype", choices=["f32", "bf16"], default="f32", help="dtype of compute, of both")
    parser.add_argument("--processes", action="store_true", help="ranks of fsdp as processes over TCP, not as threads")
    parser.add_argument("--json", help="also write all figures to this file")
    return parser.parse_args()


def result_of(command):
    """Runs a program and returns the JSON object that it prints.

    gloo sometimes aborts while its processes end, after the result is printed: what counts is the result.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    start = done.stdout.find("{")
    if start < 0:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}, no result\n{done.stderr}")
    return json.JSONDecoder().raw_decode(done.stdout[start:])[0]


def commands(args, world, micro_batch):
    common = ["--micro-batch", str(micro_batch), "--steps", str(args.steps), "--global-batch", str(GLOBAL_BATCH)]
    common += ["--param-dtype", args.param_dtype]
    launcher = [args.python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    launch = ["launch", "--nproc", str(world), "--"] if args.processes else []
    return {
        "fsdp": [args.fsdp, *launch, "bench", "train", "--json", "--ranks", str(world), "--device", args.device, *common],
        "peer": [*launcher, args.peer, *common],
    }


def measure(args, world, micro_batch):
    """All runs of one case, the two programs alternating."""
    results = {"fsdp": [], "peer": []}
    for _ in range(args.runs):
        for name, command in commands(args, world, micro_batch).items():
            result = result_of(command)
            if name == "fsdp" and args.processes:
                # It reports its first process only, and all are alike.
                result["resident_peak_bytes"] *= world
            results[name].append(result)
    case = {"world": world, "micro_batch": micro_batch, "runs": results}
    for name, runs in results.items():
        for key in ("tokens_per_s", "resident_peak_bytes"):
            case[f"{name}_{key}"] = statistics.median(run[key] for run in runs)
    case["speed_ratio"] = case["fsdp_tokens_per_s"] / case["peer_tokens_per_s"]
    case["memory_ratio"] = case["peer_resident_peak_bytes"] / case["fsdp_resident_peak_bytes"]
    return case


def show(case):
    mib = 1 << 20
    print(
        f"{case['world']:>5} {case['micro_batch']:>6}"
        f" {case['fsdp_tokens_per_s']:>12,.0f} {case['peer_tokens_per_s']:>12,.0f} {case['speed_ratio']:>7.2f}x"
        f" {case['fsdp_resident_peak_bytes'] / mib:>10,.0f} {case['peer_resident_peak_bytes'] / mib:>10,.0f}"
        f" {case['memory_ratio']:>7.2f}x",
        flush=True,
    )


def processor():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def main():
    args = arguments()
    print(f"{processor()}, {os.cpu_count()} cores, medians of {args.runs} runs, {args.param_dtype}, device {args.device}")
    print(f"{'':>12} {'tokens/s':^34} {'resident MiB':^30}")
    print(f"{'world':>5} {'micro':>6} {'fsdp':>12} {'peer':>12} {'ratio':>8} {'fsdp':>10} {'peer':>10} {'ratio':>8}")
    cases = []
    for world in (int(world) for world in args.worlds.split(",")):
        one_each = GLOBAL_BATCH // world
        for micro_batch in dict.fromkeys([one_each, 2]):
            cases.append(measure(args, world, micro_batch))
            show(cases[-1])
    if args.json:
        about = {"device": args.device, "param_dtype": args.param_dtype, "processor": processor(), "cores": os.cpu_count(), "python": platform.python_version()}
        Path(args.json).write_text(json.dumps({"machine": about, "cases": cases}, indent=2) + "\n")


if __name__ == "__main__":
    main()
