"""Schedule-free AdamW of its authors, in double precision, for schedule_free.json.

    pip install schedulefree==1.4.1
    python schedule_free.py         # torch 2.11

Inputs are made of integers, so that the test makes the same ones.
"""

import json
import pathlib

import schedulefree
import torch

from muon import numbers

LEN, STEPS = 60, 6
CASES = {
    "plain": {},
    "warmed_up": {"warmup_steps": 3, "weight_decay": 0.1},
    "low_betas": {"betas": (0.4, 0.9), "eps": 1e-3, "weight_decay": 0.05},
}


def run(options):
    """The parameters that gradients are taken at, the average, the iterate, and the second moment."""
    param = torch.nn.Parameter(numbers(0, (LEN,)))
    optimizer = schedulefree.AdamWScheduleFree([param], lr=0.02, **options)
    optimizer.train()
    for step in range(1, STEPS + 1):
        param.grad = numbers(100 * step, (LEN,))
        optimizer.step()
    train = param.detach().clone()
    optimizer.eval()
    state = optimizer.state[param]
    return [tensor.detach().flatten().tolist() for tensor in [train, param, state["z"], state["exp_avg_sq"]]]


pathlib.Path(__file__).with_suffix(".json").write_text(
    json.dumps({name: run(options) for name, options in CASES.items()}, indent=1) + "\n"
)
