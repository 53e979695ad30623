"""Muon of PyTorch for hidden matrices and AdamW for a vector, in double precision, for muon.json.

    python muon.py                  # torch 2.11

`torch.optim.Muon` rounds to bf16 before it orthogonalises; here `Tensor.bfloat16` keeps its type meanwhile, so its own code runs
in double precision. Inputs are made of integers, so that the test makes the same ones. Prints how far updates in bf16 are from these.
"""

import json
import pathlib

import torch

SHAPES, STEPS = [(24, 10), (6, 18), (12, 12), (10,)], 4
MUON = {"lr": 0.02, "weight_decay": 0.1}
ADAMW = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.05}
CASES = {
    "original": {},
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw"},
    "plain": {"nesterov": False, "momentum": 0.4},
}


def numbers(key, shape):
    """Sign, 16 bits and exponent from a hash: magnitudes from 1/32 up to 1."""
    out = []
    for i in range(torch.Size(shape).numel()):
        bits = ((i + 1) * 2654435761 + key * 40503) & 0xFFFFFFFF
        bits ^= bits >> 15
        bits = (bits * 2246822519) & 0xFFFFFFFF
        bits ^= bits >> 13
        sign = 1 if bits & 1 else -1
        out.append(sign * (1 + ((bits >> 8) % 65536) / 65536) / 2.0 ** (bits % 5 + 1))
    return torch.tensor(out, dtype=torch.float64).reshape(shape)


def run(options):
    params = [torch.nn.Parameter(numbers(index, shape)) for index, shape in enumerate(SHAPES)]
    optimizers = [torch.optim.Muon(params[:-1], **MUON, **options), torch.optim.AdamW(params[-1:], **ADAMW)]
    for step in range(1, STEPS + 1):
        for index, param in enumerate(params):
            param.grad = numbers(100 * step + index, SHAPES[index])
        for optimizer in optimizers:
            optimizer.step()
    momenta = [optimizers[0].state[param]["momentum_buffer"] for param in params[:-1]]
    return [tensor.detach().flatten().tolist() for tensor in params + momenta]


def main():
    rounded = {name: run(options) for name, options in CASES.items()}
    bfloat16 = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = torch.Tensor.clone
    golden = {name: run(options) for name, options in CASES.items()}
    torch.Tensor.bfloat16 = bfloat16
    for name, tensors in golden.items():
        pairs = [zip(a, b) for a, b in zip(tensors[:3], rounded[name][:3])]
        print(name, "in bf16 differs by", [max(abs(a - b) for a, b in pair) for pair in pairs], "after", STEPS, "steps")
    pathlib.Path(__file__).with_suffix(".json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
