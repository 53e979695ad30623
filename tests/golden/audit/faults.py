"""Errors of training steps, as they happen: in the batch, the loss, the gradients, the clipping or the update."""

import re
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

import common


@dataclass
class Fault:
    """What differs from a sound step, and what an audit should find."""

    cause: str | None = None
    params: str | None = None  # a regular expression of names; none: the fault is in all or in the step itself
    factor: float | None = None
    data: str = "padded"  # of `common.BATCHES`
    shifted: bool = False  # whether the file of the batch has labels of the next token
    run: str = "run.toml"
    clip: float | None = None
    batch: object = None  # what the step really sees of its micro-batch
    config: dict = field(default_factory=dict)  # values of the model that was really trained
    mean: str = "step"  # over which targets a loss is a mean: those of the "step", of a "micro" batch, a "rank" or each "row"
    detach: object = None  # called with the model before the step
    weight: object = None  # called with (rank, number) of a micro-batch: how often it counts
    micro: object = None  # called with (model, number) after the backward of a micro-batch
    gradients: object = None  # called with (name, gradient, rank): the gradient that is used; none: no gradient
    clipping: object = None  # called with (named parameters, clip)
    clip_after: bool = True  # whether the whole gradient is clipped
    optimizer: dict = field(default_factory=dict)  # settings of `fsdp2.optimizer_of`
    rate: object = common.rate  # the learning rate of a step
    auxiliary: float = 1.0  # factor of the balancing loss of routers
    second: str | None = None  # the cause of another error in the same step


# Gradients


def scaled(pattern, factor):
    return lambda name, gradient, rank: gradient * factor if re.search(pattern, name) else gradient


def none(pattern):
    """No gradient at all: the optimizer skips these parameters, and their states stay as they are."""
    return lambda name, gradient, rank: None if re.search(pattern, name) else gradient


def rounded(name, gradient, rank):
    """As after a reduction in bfloat16, such as that of the hook `bf16_compress_hook` of DDP."""
    return gradient.bfloat16().float()


def rows_of_rank(which, factor):
    return lambda name, gradient, rank: gradient * factor if rank == which else gradient


def only_last_micro_batch(model, at):
    """`zero_grad` inside of the loop over micro-batches."""
    if at + 1 < common.MICRO:
        model.zero_grad()


def clip_what_is_there(model, at, clip=0.5):
    """Clipping inside of the loop over micro-batches: what was added up so far is clipped with each."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)


def one_more_often(rank, at):
    return 1.1 if (rank, at) == (1, 0) else 1.0


def each_otherwise(rank, at):
    return 0.7 + 0.2 * (common.MICRO * rank + at)


def one_missing(rank, at):
    return 0.0 if (rank, at) == (0, 1) else 1.0


# Batches


def padding_counted(micro):
    labels = torch.where(micro["attention_mask"] == 0, micro["input_ids"], micro["labels"])
    return micro | {"labels": labels}


def prompts_counted(micro):
    labels = torch.where(micro["attention_mask"] == 1, micro["input_ids"], micro["labels"])
    return micro | {"labels": labels}


def documents_attend(micro):
    """A mask of ones keeps transformers from seeing in the positions where documents begin."""
    return micro | {"attention_mask": torch.ones_like(micro["input_ids"])}


def naive_packing(micro):
    """Neither positions nor a mask: one long text."""
    return {key: micro[key] for key in ("input_ids", "labels")}


def isolated(micro):
    """A mask in which documents do not see each other, for positions that do not show them."""
    document = (micro["position_ids"] == 0).cumsum(-1)
    seen = (document[:, :, None] == document[:, None, :]).tril()
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]


def positions_run_on(micro):
    positions = torch.arange(micro["input_ids"].shape[1]).expand_as(micro["input_ids"])
    return micro | {"position_ids": positions, "attention_mask": isolated(micro)}


def positions_restart_in_the_middle(micro):
    """As ranks of context parallelism do that count from 0: all tokens see each other, by wrong distances."""
    length = micro["input_ids"].shape[1]
    positions = (torch.arange(length) % (length // 2)).expand_as(micro["input_ids"])
    return micro | {"position_ids": positions, "attention_mask": torch.ones_like(micro["input_ids"])}


def other_tokens(micro):
    """Another text of the same lengths: the batch is not the one of this step."""
    changed = {key: (micro[key] * 3) % (common.VOCAB - 1) + 1 for key in ("input_ids", "labels")}
    changed["labels"] = changed["labels"].masked_fill(micro["labels"] == -100, -100)
    return micro | changed


def shifted_twice(micro):
    labels = F.pad(micro["labels"][:, 1:], (0, 1), value=-100)
    return micro | {"labels": labels}


# Modules


def detach_routers(model):
    """Routers choose experts and weigh them, but nothing flows back through them."""
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, inputs, outputs: tuple(each.detach() for each in outputs))


def detach_weight(pattern):
    """The weight of a module is used, but without a gradient."""

    def change(model):
        for name, module in model.named_modules():
            if re.search(pattern, name):
                kind = F.embedding if isinstance(module, torch.nn.Embedding) else F.linear
                if kind is F.embedding:
                    module.forward = lambda ids, module=module: F.embedding(ids, module.weight.detach())
                else:
                    module.forward = lambda x, module=module: F.linear(x, module.weight.detach())

    return change


# Clipping


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def squares(gradients):
    return sum(local(gradient).square().sum() for gradient in gradients)


def present(named):
    return [parameter for _, parameter in named if parameter.grad is not None]


def clip_by(gradients, norm, clip):
    for gradient in gradients:
        local(gradient).mul_(min(1.0, clip / (float(norm) + 1e-6)))


def clip_none(named, clip):
    """No clipping."""


def clip_per_rank(named, clip):
    """Each rank takes the norm of its own shards for that of the model."""
    gradients = [parameter.grad for parameter in present(named)]
    clip_by(gradients, squares(gradients).sqrt(), clip)


def clip_per_group(named, clip):
    """Each parameter is clipped by its own norm."""
    for parameter in present(named):
        torch.nn.utils.clip_grad_norm_([parameter], clip)


def clip_per_unit(named, clip):
    """Each layer is clipped by its own norm, and what is in none by that of all such parameters."""
    units = {}
    for name, parameter in named:
        units.setdefault("".join(re.findall(r"layers\.\d+", name)), []).append(parameter)
    for parameters in units.values():
        torch.nn.utils.clip_grad_norm_(parameters, clip)


def clip_by_largest(named, clip):
    """The largest element for the norm."""
    torch.nn.utils.clip_grad_norm_(present(named), clip, norm_type=float("inf"))


def clip_by_sum(named, clip):
    """The sum of all elements for the norm."""
    torch.nn.utils.clip_grad_norm_(present(named), clip, norm_type=1.0)


def clip_values(named, clip):
    """Each element by itself."""
    for parameter in present(named):
        local(parameter.grad).clamp_(-clip, clip)


# Update rules


class WrongAdamW(torch.optim.AdamW):
    """AdamW written out, with an error."""

    correct, inside = True, False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter] or self.begin(parameter)
                    state["step"] += 1
                    m = state["exp_avg"].lerp_(parameter.grad, 1 - b1)
                    v = state["exp_avg_sq"].mul_(b2).add_(parameter.grad.square(), alpha=1 - b2)
                    first, second = (1 - b ** float(state["step"]) if self.correct else 1.0 for b in (b1, b2))
                    v = v / second
                    root = (v + group["eps"]).sqrt() if self.inside else v.sqrt() + group["eps"]
                    parameter.mul_(1 - lr * group["weight_decay"]).sub_(lr * (m / first) / root)

    def begin(self, parameter):
        zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        self.state[parameter] = {"step": torch.tensor(0.0)} | zeros
        return self.state[parameter]


class WithoutCorrection(WrongAdamW):
    """No bias correction."""

    correct = False


class EpsilonInside(WrongAdamW):
    """sqrt(v + eps) for sqrt(v) + eps."""

    inside = True
