"""Write loss_scale.json: how the scale of torch.amp.GradScaler goes over steps that overflow and steps that do not.

usage: python loss_scale.py [--out FOLDER]      (torch 2.11.0)

Every object has the scale of the first step, the growth interval, whether the gradients of each step are finite, and the scale
and the steps without an overflow behind each of them. README.md says more.
"""

import argparse
import json
import pathlib
import random

import torch

CASES = [(65536.0, 3, 60, 0.25), (1024.0, 1, 30, 0.5), (2.0**20, 5, 80, 0.1), (2.0**126, 2, 20, 0.1)]


def entry(seed, init, growth_interval, steps, overflows):
    draw = random.Random(seed)
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=growth_interval)
    finite, scales, good_steps = [], [], []
    for _ in range(steps):
        finite.append(draw.random() >= overflows)
        # The scaler makes its tensors with the first loss.
        scaler.scale(torch.zeros(()))
        param.grad = torch.tensor([0.0 if finite[-1] else float("inf")])
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        good_steps.append(scaler._get_growth_tracker())
    return dict(
        init=init, growth_interval=growth_interval, finite=finite, scales=scales, good_steps=good_steps
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    out = parser.parse_args().out
    entries = [entry(seed, *case) for seed, case in enumerate(CASES)]
    text = ",\n".join(json.dumps(entry) for entry in entries)
    (out / "loss_scale.json").write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
