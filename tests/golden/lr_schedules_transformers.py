"""Write lr_schedules_transformers.json: what transformers' get_scheduler says, step by step.

usage: python lr_schedules_transformers.py [--out FOLDER]      (torch 2.11.0, transformers 5.17.0)

Every object has the keys of `[train.lr_schedule]` under "schedule" ("decay_steps" is transformers' number, not our share),
the length of the run, and `lr_per_step`. README.md says more.
"""

import argparse
import itertools
import json

import torch
import transformers
from transformers import get_scheduler

LR = 3e-3


def rates(name, warmup, steps, **arguments):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = get_scheduler(name, optimizer, warmup, steps, arguments)
    out = []
    for _ in range(steps):
        out.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return out


def entries():
    for steps, warmup in [(40, 0), (40, 7), (33, 1), (12, 12)]:
        run = dict(steps=steps, warmup_steps=warmup)

        def entry(theirs, arguments, **schedule):
            return run | dict(schedule=schedule, lr_per_step=rates(theirs, warmup, steps, **arguments))

        yield entry("constant_with_warmup", {}, name="constant")
        yield entry("linear", {}, name="linear", min_lr_ratio=0.0)
        for ratio in [0.0, 0.1]:
            yield entry("cosine_with_min_lr", dict(min_lr_rate=ratio), name="warmup-cosine", min_lr_ratio=ratio)
        for cycles in [1, 2, 5]:
            yield entry("cosine_with_restarts", dict(num_cycles=cycles), name="cosine-with-restarts", cycles=cycles)
        for timescale in [None, 3, 100]:
            ours = timescale or warmup or 10_000
            yield entry("inverse_sqrt", dict(timescale=timescale), name="inverse-sqrt", timescale=ours)
        decays = [d for d in [0, 1, 10, steps - warmup] if d <= steps - warmup]
        for curve, decay, ratio in itertools.product(["linear", "cosine", "1-sqrt"], decays, [0.0, 0.2]):
            theirs = dict(num_decay_steps=decay, decay_type=curve, min_lr_ratio=ratio)
            ours = dict(name="warmup-stable-decay", decay_steps=decay, decay=curve, min_lr_ratio=ratio)
            yield entry("warmup_stable_decay", theirs, **ours)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=".")
    folder = parser.parse_args().out
    assert transformers.__version__ == "5.17.0", transformers.__version__
    with open(f"{folder}/lr_schedules_transformers.json", "w") as file:
        lines = ",\n".join(json.dumps(dict(lr=LR) | entry) for entry in entries())
        file.write(f"[\n{lines}\n]\n")
