"""Rates of the Trainer's schedules, as transformers computes them: python schedules.py. See README.md."""

import json

import torch
from transformers import TrainingArguments, get_scheduler

import common

STEPS = 20
# Kinds with their arguments; those without a form in run files are told apart by `expected`.
KINDS = [
    ("linear", {}), ("constant", {}), ("constant_with_warmup", {}), ("cosine", {}), ("cosine", {"num_cycles": 0.5}),
    ("cosine_with_restarts", {}), ("cosine_with_restarts", {"num_cycles": 3}), ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 5}), ("polynomial", {}), ("polynomial", {"lr_end": 1e-3}),
    ("cosine_with_min_lr", {"min_lr": 1e-3}), ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
]  # fmt: skip
OTHERS = [("cosine", {"num_cycles": 1.5}), ("polynomial", {"power": 2.0}), ("warmup_stable_decay", {"num_decay_steps": 4})]


def rates(kind, kwargs, warmup):
    arguments = TrainingArguments(output_dir="work", use_cpu=True, warmup_steps=warmup)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=common.LR)
    schedule = get_scheduler(kind, optimizer, arguments.get_warmup_steps(STEPS), STEPS, dict(kwargs))
    made = []
    for _ in range(STEPS):
        made.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return made


if __name__ == "__main__":
    cases = []
    for kind, kwargs in KINDS + OTHERS:
        for warmup in (0, 3, 0.12):  # 0.12 of 20 steps is 2.4, which is rounded up
            case = {"kind": kind, "kwargs": kwargs, "warmup_steps": warmup, "has_form": (kind, kwargs) in KINDS}
            cases.append(case | {"rates": rates(kind, kwargs, warmup)})
    (common.HERE / "schedules.json").write_text("\n".join(["[" + ",\n".join(map(json.dumps, cases)) + "]"]) + "\n")
