"""Write router_terms.json: z-loss and sequence-wise balance loss of routers and their gradients, from their equations.

usage: python router_terms.py [--out FOLDER]      (torch 2.11.0)

Everything in double precision, row by row: z-loss, ST-MoE (arXiv 2202.08906), equation 5, over the counted rows of all
layers; sequence-wise balance loss, DeepSeek V3 (arXiv 2412.19437), equations 17 to 20, the mean over sequences and layers.
A sequence is a document, as far as its rows count, or a sample without documents.
"""

import argparse
import json

import torch

SEQ = 6


def z_loss(layers, rows):
    squares = [torch.logsumexp(logits[row], 0) ** 2 for logits in layers for row in rows]
    return sum(squares) / len(squares)


def sequence_loss(layers, sequences, top, scoring):
    losses = []
    for logits in layers:
        experts = logits.shape[1]
        for rows in sequences:
            scores = {row: torch.softmax(logits[row], 0) if scoring == "softmax" else torch.sigmoid(logits[row]) for row in rows}
            chosen = {row: scores[row].detach().topk(top).indices.tolist() for row in rows}
            loss = 0.0
            for expert in range(experts):
                f = experts / (top * len(rows)) * sum(expert in chosen[row] for row in rows)
                p = sum(scores[row][expert] / scores[row].sum() for row in rows) / len(rows)
                loss = loss + f * p
            losses.append(loss)
    return sum(losses) / len(losses)


def entries():
    generator = torch.Generator().manual_seed(12)
    for layers, experts, top, scoring, lengths, documents in [
        (1, 4, 1, "softmax", [6], []),
        (1, 5, 2, "sigmoid", [6, 6], []),
        (3, 5, 2, "softmax", [6, 3], [(0, 1), (1, 4), (4, 6), (6, 8), (8, 10), (10, 12)]),
        (2, 7, 3, "sigmoid", [1, 0, 6], []),
        (2, 6, 2, "sigmoid", [6, 5], [(0, 4), (4, 6), (6, 12)]),
    ]:
        logits = [
            (2.0 * torch.randn(SEQ * len(lengths), experts, generator=generator, dtype=torch.float64)).requires_grad_()
            for _ in range(layers)
        ]
        rows = [SEQ * sample + row for sample, length in enumerate(lengths) for row in range(length)]
        whole = [(SEQ * sample, SEQ * sample + SEQ) for sample in range(len(lengths))]
        sequences = [[row for row in range(*ends) if row in rows] for ends in documents or whole]
        z = z_loss(logits, rows)
        sequence = sequence_loss(logits, [each for each in sequences if each], top, scoring)
        yield dict(
            experts=experts,
            top=top,
            scoring=scoring,
            lengths=lengths,
            documents=documents,
            logits=[each.detach().flatten().tolist() for each in logits],
            z_loss=z.item(),
            z_gradients=[each.flatten().tolist() for each in torch.autograd.grad(z, logits)],
            sequence_loss=sequence.item(),
            sequence_gradients=[each.flatten().tolist() for each in torch.autograd.grad(sequence, logits)],
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=".")
    folder = parser.parse_args().out
    assert torch.__version__.startswith("2.11.0"), torch.__version__
    torch.set_num_threads(1)
    with open(f"{folder}/router_terms.json", "w") as file:
        lines = ",\n".join(json.dumps(entry) for entry in entries())
        file.write(f"[\n{lines}\n]\n")
