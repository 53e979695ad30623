"""Looks at every case without the program: which gradient the moments hold, against plain transformers on the batch.

usage: python check.py [NAME ..]

For each case: how far the used gradient is from the right one; how far the new weights are from those that AdamW makes of the
used gradient by the run file; the best factor between the gradients. Both distances are near 0 in a sound case, and at least
one is not in another.
"""

import json
import logging
import sys
import tomllib

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import common
import states

logging.disable()  # of loaders

# By the dtype of compute: above this a gradient is another one. And above this the weights are.
GRADIENT = {"f32": 2e-5, "bf16": 3e-2, "pure bf16": 0.1}
UPDATE = {"f32": 2e-5, "bf16": 2e-5, "pure bf16": 0.3}


def batch_of(path):
    tensors, micros = load_file(path), []
    while f"m{len(micros)}.input_ids" in tensors:
        prefix = f"m{len(micros)}."
        micros.append({name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)})
    return micros


def unshifted(micro):
    """Labels of the next token as transformers takes them: behind one that is none, with the last target as an input."""
    last = micro["labels"][:, -1:]
    made = {
        "input_ids": torch.cat([micro["input_ids"], last.clamp(min=0)], 1),
        "labels": F.pad(micro["labels"], (1, 0), value=-100),
    }
    if "position_ids" in micro:
        after = torch.where(last == -100, 0, micro["position_ids"][:, -1:] + 1)
        made["position_ids"] = torch.cat([micro["position_ids"], after], 1)
    return made


def texts(micro):
    """The documents of a micro-batch, each alone: ids and labels, without padding."""
    for row, ids in enumerate(micro["input_ids"]):
        labels, starts = micro["labels"][row], [0]
        length = int(micro["attention_mask"][row].sum()) if "attention_mask" in micro else len(ids)
        if "position_ids" in micro:
            starts = (micro["position_ids"][row] == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], length]):
            yield ids[start:end], labels[start:end]


def right_gradient(model, micros):
    """Mean over all targets of a step, text by text. The balancing loss is one of a micro-batch: it has its own forward."""
    total = sum(int((labels[1:] != -100).sum()) for micro in micros for _, labels in texts(micro))
    model.zero_grad()
    for micro in micros:
        for ids, labels in texts(micro):
            logits = model(input_ids=ids[None]).logits[0, :-1]
            (F.cross_entropy(logits, labels[1:], reduction="sum") / total).backward()
        if getattr(model.config, "output_router_logits", False):
            count = int((micro["labels"][:, 1:] != -100).sum())
            inputs = {key: value for key, value in micro.items() if key != "labels"}
            (model(**inputs).aux_loss * model.config.router_aux_loss_coef * count / total).backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.requires_grad}


def rate(run, step):
    schedule = run["train"]["lr_schedule"]
    lr, warmup = run["train"]["optimizer"]["lr"], schedule.get("warmup_steps", 0)
    if step < warmup:
        return lr * step / warmup
    if schedule["name"] == "constant":
        return lr
    part = torch.tensor((step - warmup) / (run["train"]["steps"] - warmup) * torch.pi, dtype=torch.float64)
    return lr * 0.5 * (1.0 + part.cos().item())


def updated(run, name, weight, state, gradient):
    """AdamW's next weight, with float64."""
    optimizer = run["train"]["optimizer"]
    (b1, b2), step = optimizer["betas"], int(state["step"]) + 1
    lr = rate(run, step - 1)
    decay = 0.0 if any(part in name for part in optimizer["no_decay"]) else optimizer["weight_decay"]
    m = b1 * state["exp_avg"].double() + (1 - b1) * gradient
    v = b2 * state["exp_avg_sq"].double() + (1 - b2) * gradient**2
    root = (v / (1 - b2**step)).sqrt() + optimizer["eps"]
    return weight.double() * (1 - lr * decay) - lr * m / (1 - b1**step) / root


def distance(a, b, reference):
    """Of all parameters together, relative to the reference."""
    flat = [torch.cat([each[name].double().flatten() for name in a]) for each in (a, b, reference)]
    return float((flat[0] - flat[1]).norm() / flat[2].norm())


def best_factor(used, right):
    flat = [torch.cat([each[name].flatten() for name in used]) for each in (used, right)]
    return float(flat[0] @ flat[1] / flat[1].square().sum())


def case(folder, expected):
    """Distances of gradient and update, the factor in the named parameters, and that in the others."""
    run = tomllib.loads((folder / expected["run"]).read_text())
    model = states.model(folder / run["model"]["path"], run.get("adapter"))
    before, after = (states.read(folder / expected[which], model, folder) for which in ("before", "after"))
    states.load(model, before.weights)
    micros = batch_of(folder / expected["batch"])
    right = right_gradient(model, [unshifted(micro) for micro in micros] if expected["shifted"] else micros)
    b1 = run["train"]["optimizer"]["betas"][0]
    moments = {name: (before.states[name]["exp_avg"], after.states[name]["exp_avg"]) for name in right}
    used = {name: (m1.double() - b1 * m.double()) / (1 - b1) for name, (m, m1) in moments.items()}
    clip = run["train"].get("grad_clip")
    if clip:
        norm = torch.cat([gradient.flatten() for gradient in right.values()]).norm()
        right = {name: gradient * min(1.0, clip / float(norm)) for name, gradient in right.items()}
    old = {name: before.weights[name] for name in right}
    new = {name: after.weights[name].double() for name in right}
    next_one = {name: updated(run, name, old[name], before.states[name], used[name]) for name in right}
    moved = {name: new[name] - old[name].double() for name in right}
    listed = set(expected["params"])
    named = [name for name in right if not listed or listed & set(common.published(name))]
    others = [name for name in right if name not in named]
    factors = [best_factor({n: used[n] for n in part}, right) if part else None for part in (named, others)]
    pure = all(tensor.dtype == torch.bfloat16 for tensor in old.values())
    dtype = "pure bf16" if pure else run["fsdp"].get("param_dtype", "f32")
    return distance(used, right, right), distance(new, next_one, moved), factors, dtype


def main():
    wrong = []
    for path in sorted(common.HERE.glob("*/*/expected.json")):
        folder, expected = path.parents[1], json.loads(path.read_text())
        if sys.argv[1:] and folder.name not in sys.argv[1:]:
            continue
        if folder.name == "torch-optimizers":  # not AdamW, or several steps
            continue
        gradient, update, factors, dtype = case(folder, expected)
        whole = factors[0] / (factors[1] or 1.0)
        scaled = expected["cause"] == "gradient_scaled" and expected["params"] and "rows-of" not in path.parent.name
        planted = expected["factor"] if scaled else whole
        visible = gradient > GRADIENT[dtype] or update > UPDATE[dtype]
        if visible != (expected["verdict"] == "findings") or abs(whole - planted) > 0.01 * abs(planted):
            wrong.append(path)
        shown = " ".join("-" if factor is None else f"{factor:.5f}" for factor in factors)
        size = sum(file.stat().st_size for file in path.parent.rglob("*") if file.is_file()) // 1024
        name, cause = f"{folder.name}/{path.parent.name}", expected["cause"] or "sound"
        print(
            f"{name:44} {size:4} KB  {cause:22} {expected['factor'] or '':<8.6} {gradient:.1e} {update:.1e}  {shown}",
            flush=True,
        )
    if wrong:
        sys.exit(f"not as expected: {wrong}")


if __name__ == "__main__":
    main()
