#!/usr/bin/env python3
"""Compares `fsdp bench train` on XLA for processors with its own kernels, and with PyTorch/XLA.

    bench/xla.py --python PATH/TO/python --plugin PLUGIN.so [--fsdp target/release/fsdp]
                 [--runs 3] [--worlds 1,2] [--micro-batch 0] [--steps 12] [--json FILE]

`--python` is an interpreter with torch and torch_xla; `--plugin` a PJRT plugin for processors. The three programs train the
model of bench/compare.py and run alternately. Printed are medians over the runs: tokens/s, how many times faster fsdp on XLA
is than each of the others, and the seconds that the three steps of the warm-up take longer than later ones, which is compiling.
"""

import argparse
import json
import os
import statistics
from pathlib import Path

from compare import GLOBAL_BATCH, processor, result_of

HERE = Path(__file__).resolve().parent
# Warm-up steps that are not counted; the default of all three programs.
WARMUP = 3


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="a Python interpreter that has torch_xla")
    parser.add_argument("--plugin", required=True, help="the library of a PJRT plugin for processors")
    parser.add_argument("--fsdp", default=str(HERE.parent / "target/release/fsdp"), help="the fsdp binary, built with xla")
    parser.add_argument("--runs", type=int, default=3, help="runs of each program and case")
    parser.add_argument("--worlds", default="1,2", help="world sizes")
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences per pass and rank; 0: one pass per step")
    parser.add_argument("--steps", type=int, default=12, help="steps of a run")
    parser.add_argument("--json", help="also write all figures to this file")
    return parser.parse_args()


def commands(args, world):
    micro_batch = args.micro_batch or GLOBAL_BATCH // world
    common = ["--ranks", str(world), "--micro-batch", str(micro_batch), "--steps", str(args.steps)]
    common += ["--global-batch", str(GLOBAL_BATCH)]
    fsdp = [args.fsdp, "bench", "train", "--json", *common, "--device"]
    return {
        "host": [*fsdp, "cpu"],
        "xla": [*fsdp, "xla"],
        "torch_xla": [args.python, str(HERE / "torch_xla_peer.py"), *common],
    }


def measure(args, world):
    """All runs of one case, the programs alternating."""
    os.environ |= {"PJRT_PLUGIN_LIBRARY_PATH": args.plugin, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(world)}
    runs = {name: [] for name in commands(args, world)}
    for _ in range(args.runs):
        for name, command in commands(args, world).items():
            runs[name].append(result_of(command))
    case = {"world": world, "runs": runs}
    for name, results in runs.items():
        case[f"{name}_tokens_per_s"] = statistics.median(run["tokens_per_s"] for run in results)
        longer = [sum(run["step_ms"][:WARMUP]) - WARMUP * run["step_ms_median"] for run in results]
        case[f"{name}_compile_s"] = statistics.median(longer) / 1e3
        case[f"{name}_resident_mib"] = statistics.median(run["resident_peak_bytes"] for run in results) / (1 << 20)
    return case


def show(case):
    rates = [case[f"{name}_tokens_per_s"] for name in ("host", "xla", "torch_xla")]
    seconds = [case[f"{name}_compile_s"] for name in ("xla", "torch_xla")]
    resident = [case[f"{name}_resident_mib"] for name in ("host", "xla", "torch_xla")]
    print(
        f"{case['world']:>5}" + "".join(f" {rate:>10,.0f}" for rate in rates)
        + f" {rates[1] / rates[0]:>8.2f}x {rates[1] / rates[2]:>9.2f}x"
        + "".join(f" {one:>9.1f}" for one in seconds) + "".join(f" {one:>9,.0f}" for one in resident),
        flush=True,
    )


def main():
    args = arguments()
    print(f"{processor()}, {os.cpu_count()} cores, medians of {args.runs} runs; tokens/s, seconds of compiling, resident MiB")
    names = ["world", "host", "xla", "torch_xla", "of host", "of torch_xla", "xla s", "torch_xla s", "host", "xla", "torch_xla"]
    print(" ".join(names))
    cases = []
    for world in (int(world) for world in args.worlds.split(",")):
        cases.append(measure(args, world))
        show(cases[-1])
    if args.json:
        machine = {"processor": processor(), "cores": os.cpu_count(), "plugin": args.plugin}
        Path(args.json).write_text(json.dumps({"machine": machine, "cases": cases}, indent=2) + "\n")


if __name__ == "__main__":
    main()
