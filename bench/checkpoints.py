#!/usr/bin/env python3
"""Compares `fsdp ckpt convert` with PyTorch's `dcp_to_torch_save` and with copying the bytes, side by side.

    bench/checkpoints.py --python PATH/TO/python [--fsdp target/release/fsdp] [--dir DIR]
                         [--megabytes 1100] [--runs 5] [--json FILE]

`--python` is an interpreter with torch; it makes the checkpoint, of two ranks, with parameters and the state of
AdamW, and runs `dcp_to_torch_save`. All programs run in turn, so that a machine that slows down slows all of
them, as whole processes with everything in the page cache. In the rows with fsync, `cp` is followed by
`sync FILE..`. Printed are medians over the runs; a program's memory is the largest resident size of its process.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent

MAKE = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard
out, megabytes = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
shapes = {"embed.weight": (8192, 1024)}
layers = max(1, (megabytes * 1_000_000 // 12 - 8192 * 1024) // 12_600_000)
for i in range(layers):
    p = f"layers.{i}."
    shapes |= {p + "norm.weight": (1024,), p + "qkv.weight": (3072, 1024), p + "o.weight": (1024, 1024),
               p + "up.weight": (4096, 1024), p + "down.weight": (1024, 4096), p + "down.bias": (1024,)}
def make(shape):
    return distribute_tensor(torch.randn(shape), mesh, [Shard(0)])
state = {n: {"step": torch.tensor(7.0), "exp_avg": make(s), "exp_avg_sq": make(s)} for n, s in shapes.items()}
groups = [{"lr": 1e-3, "params": list(shapes)}]
dcp.save({"model": {n: make(s) for n, s in shapes.items()}, "optim": {"state": state, "param_groups": groups}},
         checkpoint_id=out)
dist.destroy_process_group()
"""

PEER = """
import sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
"""


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="a Python interpreter that has torch")
    parser.add_argument("--fsdp", default=str(HERE.parent / "target/release/fsdp"), help="the fsdp binary")
    parser.add_argument("--dir", help="where to make the files (default: the directory for temporary files)")
    parser.add_argument("--megabytes", type=int, default=1100, help="size of the checkpoint")
    parser.add_argument("--runs", type=int, default=5, help="runs of each program")
    parser.add_argument("--json", help="also write all figures to this file")
    return parser.parse_args()


def make(args, where):
    """Lets two ranks save a checkpoint."""
    script = where / "make.py"
    script.write_text(MAKE)
    launcher = [args.python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    source = where / "checkpoint"
    done = subprocess.run([*launcher, script, source, str(args.megabytes)], capture_output=True, text=True)
    if not (source / ".metadata").exists():
        sys.exit(f"the checkpoint was not made: exit code {done.returncode}\n{done.stderr}")
    return source


def programs(args, source, out):
    """The command of each program; each makes `out` from `source`."""
    convert = [args.fsdp, "ckpt", "convert", source, out, "--to", "safetensors", "--only", "all"]
    copy = f"cp -r '{source}' '{out}'"
    return {
        "cp -r": ["sh", "-c", copy],
        "fsdp": [*convert, "--no-sync"],
        "dcp_to_torch_save": [args.python, "-c", PEER, source, out],
        "cp -r, fsync": ["sh", "-c", f"{copy} && sync '{out}'/* '{out}'"],
        "fsdp, fsync": convert,
    }


def remove(path):
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


def run(command, out):
    """Seconds and largest resident bytes of a process."""
    remove(out)
    os.sync()  # flush pending writes, so that they do not count in the time of this command
    started = time.monotonic()
    child = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.monotonic() - started
    if status != 0:
        sys.exit(f"{command[0]} failed: {errors.decode()}")
    remove(out)
    return seconds, usage.ru_maxrss * 1024


def measure(args, source, out):
    """All runs, the programs in turn; the first round warms up and does not count."""
    commands = programs(args, source, out)
    figures = {name: [] for name in commands}
    for round_number in range(args.runs + 1):
        for name, command in commands.items():
            figure = run(command, out)
            if round_number > 0:
                figures[name].append(figure)
    return figures


def show(figures, size):
    medians = {name: statistics.median(seconds for seconds, _ in runs) for name, runs in figures.items()}
    print(f"checkpoint of {size / 1e6:,.0f} MB, medians of {len(figures['fsdp'])} runs")
    print(f"{'':<20} {'seconds':>8} {'fastest':>8} {'MB/s':>7} {'to cp':>7} {'to fsdp':>8} {'resident MiB':>13}")
    for name, runs in figures.items():
        end = ", fsync" if name.endswith(", fsync") else ""
        seconds = medians[name]
        print(
            f"{name:<20} {seconds:>8.2f} {min(seconds for seconds, _ in runs):>8.2f} {size / 1e6 / seconds:>7,.0f}"
            f" {seconds / medians['cp -r' + end]:>6.2f}x {seconds / medians['fsdp' + end]:>7.2f}x"
            f" {max(resident for _, resident in runs) / (1 << 20):>13,.0f}"
        )


def main():
    args = arguments()
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="fsdp-bench-") as where:
        where = Path(where)
        source = make(args, where)
        size = sum(path.stat().st_size for path in source.iterdir())
        figures = measure(args, source, where / "out")
    show(figures, size)
    if args.json:
        runs = {name: [{"seconds": s, "resident_bytes": r} for s, r in runs] for name, runs in figures.items()}
        about = {"cores": os.cpu_count(), "checkpoint_bytes": size}
        Path(args.json).write_text(json.dumps({"machine": about, "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
