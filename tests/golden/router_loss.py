"""Write router_loss.json: the balancing loss of routers and its gradients, from transformers' load_balancing_loss_func.

usage: python router_loss.py [--out FOLDER]      (torch 2.11.0, transformers 5.17.0)

Logits in double precision (the function itself adds in single precision). The mask is 1 for the rows of a sample up to its
last counted target.
"""

import argparse
import json

import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func


def entries():
    generator = torch.Generator().manual_seed(11)
    for layers, experts, top, lengths in [
        (1, 4, 1, [6]),
        (1, 5, 2, [6, 6]),
        (3, 5, 2, [6, 3]),
        (2, 7, 3, [1, 0, 6]),
    ]:
        rows = 6 * len(lengths)
        logits = [
            (2.0 * torch.randn(rows, experts, generator=generator, dtype=torch.float64)).requires_grad_()
            for _ in range(layers)
        ]
        mask = torch.tensor([[1 if row < length else 0 for row in range(6)] for length in lengths])
        loss = load_balancing_loss_func(tuple(logits), experts, top, mask)
        loss.backward()
        yield dict(
            experts=experts,
            top=top,
            lengths=lengths,
            logits=[each.detach().flatten().tolist() for each in logits],
            loss=loss.item(),
            gradients=[each.grad.flatten().tolist() for each in logits],
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=".")
    folder = parser.parse_args().out
    assert torch.__version__.startswith("2.11.0"), torch.__version__
    assert transformers.__version__ == "5.17.0", transformers.__version__
    torch.set_num_threads(1)
    with open(f"{folder}/router_loss.json", "w") as file:
        lines = ",\n".join(json.dumps(entry) for entry in entries())
        file.write(f"[\n{lines}\n]\n")
