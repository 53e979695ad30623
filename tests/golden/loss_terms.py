"""Write loss_terms.json: losses and gradients of logits with label smoothing and z-loss, from PyTorch.

usage: python loss_terms.py [--out FOLDER]      (torch 2.11.0)

Double precision. The loss is `torch.nn.functional.cross_entropy(label_smoothing=..)` plus the coefficient times the squared
`torch.logsumexp` (PaLM has no code of its own: the formula of its section 5). A target of -100 does not count.
"""

import argparse
import json

import torch
import torch.nn.functional as F


def entries():
    generator = torch.Generator().manual_seed(7)
    for rows, vocab, spread in [(3, 5, 1.0), (4, 37, 3.0), (2, 11, 60.0)]:
        for smoothing, z_loss in [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.3, 1e-4)]:
            logits = (spread * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)).requires_grad_()
            targets = torch.randint(0, vocab, (rows,), generator=generator)
            targets[1] = -100
            counts = targets != -100
            losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
            losses = losses + torch.where(counts, z_loss * torch.logsumexp(logits, 1) ** 2, 0.0)
            losses.sum().backward()
            yield dict(
                vocab=vocab,
                label_smoothing=smoothing,
                z_loss=z_loss,
                logits=logits.detach().flatten().tolist(),
                targets=targets.tolist(),
                losses=losses.detach().tolist(),
                gradient=logits.grad.flatten().tolist(),
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=".")
    folder = parser.parse_args().out
    assert torch.__version__.startswith("2.11.0"), torch.__version__
    torch.set_num_threads(1)
    with open(f"{folder}/loss_terms.json", "w") as file:
        lines = ",\n".join(json.dumps(entry) for entry in entries())
        file.write(f"[\n{lines}\n]\n")
