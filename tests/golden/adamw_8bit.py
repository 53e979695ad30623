"""AdamW with 8-bit state of bitsandbytes and of torchao, on the processor, for adamw_8bit.json.

    python adamw_8bit.py            # torch 2.11, bitsandbytes 0.50, torchao 0.18

A parameter of 20 rows of 256 elements, so that blocks by rows are those of the flat parameter. Inputs are made of integers, so
that the test makes the same ones. The maps are bitsandbytes', the state is torchao's: bitsandbytes does not always choose the
nearest code on a processor. Prints how many of their codes differ.
"""

import json
import pathlib

import bitsandbytes.functional as bnb
import torch
from bitsandbytes.optim import AdamW8bit as BnbAdamW
from torchao.optim import AdamW8bit as AoAdamW

ROWS, COLS, STEPS = 20, 256, 5
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def numbers(key):
    """Sign, 16 bits and exponent from a hash: magnitudes from 1/32 up to 1."""
    out = []
    for i in range(ROWS * COLS):
        bits = ((i + 1) * 2654435761 + key * 40503) & 0xFFFFFFFF
        bits ^= bits >> 15
        bits = (bits * 2246822519) & 0xFFFFFFFF
        bits ^= bits >> 13
        sign = 1 if bits & 1 else -1
        out.append(sign * (1 + ((bits >> 8) % 65536) / 65536) / 2.0 ** (bits % 5 + 1))
    return torch.tensor(out, dtype=torch.float32).reshape(ROWS, COLS)


def run(make):
    param = torch.nn.Parameter(numbers(0))
    optimizer = make(param)
    for step in range(1, STEPS + 1):
        param.grad = numbers(step)
        optimizer.step()
    return param.detach(), optimizer.state[param]


def of_bitsandbytes():
    param, state = run(lambda p: BnbAdamW([p], **OPTIONS))
    return param, state["state1"], state["absmax1"], state["state2"], state["absmax2"]


def of_torchao():
    with torch._dynamo.config.patch(disable=True):
        param, state = run(lambda p: AoAdamW([p], **OPTIONS))
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    return param, mean.codes, mean.scale, square.codes, square.scale


def main():
    bitsandbytes, torchao = of_bitsandbytes(), of_torchao()
    for what, index in (("first", 1), ("second", 3)):
        count = int((bitsandbytes[index] != torchao[index]).sum())
        print(f"codes of {what} moments that differ: {count} of {ROWS * COLS}")
    print("parameters differ by at most", float((bitsandbytes[0] - torchao[0]).abs().max()))
    param, mean, mean_absmax, square, square_absmax = torchao
    golden = {
        "signed": bnb.create_dynamic_map(True).tolist(),
        "unsigned": bnb.create_dynamic_map(False).tolist(),
        "bitsandbytes": bitsandbytes[0].flatten()[::7].tolist(),
        "param": param.flatten()[::7].tolist(),
        "exp_avg_codes": bytes(mean.flatten().tolist()).hex(),
        "exp_avg_absmax": mean_absmax.flatten().tolist(),
        "exp_avg_sq_codes": bytes(square.flatten().tolist()).hex(),
        "exp_avg_sq_absmax": square_absmax.flatten().tolist(),
    }
    pathlib.Path(__file__).with_suffix(".json").write_text(json.dumps(golden, indent=1) + "\n")


main()
