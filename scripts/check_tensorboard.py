"""Compares the event files of a run (run.metrics = ["tensorboard"]) with its metrics.jsonl, as TensorBoard itself reads them.

    pip install tensorboard==2.21.0
    target/release/fsdp train examples/quickstart.toml --set 'run.metrics=["tensorboard"]'
    python scripts/check_tensorboard.py runs/quickstart
"""

import json
import math
import os
import sys

import numpy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util


def expected(run):
    """(tag, step) -> value"""
    values = {}
    with open(os.path.join(run, "metrics.jsonl")) as file:
        for line in map(json.loads, file):
            step, name = line.pop("step", None), line.pop("set", None)
            if step is None:
                continue
            for key, value in line.items():
                tag = f"{key}/{name}" if name else f"train/{key}"
                values[tag, step] = math.nan if value is None else value
    return values


def found(run):
    events = EventAccumulator(os.path.join(run, "tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    tags = events.Tags()
    values = [(tag, event.step, event.value) for tag in tags["scalars"] for event in events.Scalars(tag)]
    for tag in tags["tensors"]:
        values += [(tag, e.step, tensor_util.make_ndarray(e.tensor_proto).item()) for e in events.Tensors(tag)]
    return values


def main():
    run = sys.argv[1]
    ours, theirs = expected(run), found(run)
    places = [(tag, step) for tag, step, _ in theirs]
    if len(set(places)) < len(places):
        sys.exit("a step is there twice")
    if set(places) != set(ours):
        sys.exit(f"steps differ: {sorted(set(places) ^ set(ours))[:10]}")
    for tag, step, value in theirs:
        if not numpy.array_equal(numpy.float32(ours[tag, step]), numpy.float32(value), equal_nan=True):
            sys.exit(f"{tag} at step {step}: {ours[tag, step]} was written, {value} is read")
    print(f"{len(places)} values of {len({tag for tag, _ in places})} tags are equal")


if __name__ == "__main__":
    main()
