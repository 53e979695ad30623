"""Steps of other optimizers than AdamW, and several steps of AdamW, in one process of plain PyTorch. See README.md.

Lion is that of lion-pytorch 0.2.5.
"""

import copy
import json
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from lion_pytorch import Lion

import common
import faults
import snippets
from faults import Fault, scaled
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

FOLDER = "torch-optimizers"
FULL = StateDictOptions(full_state_dict=True)


@dataclass
class Optimizer:
    """An optimizer, as the run file has it."""

    kind: type
    settings: dict  # of the run file and of PyTorch
    lr: float
    cases: dict
    decay: float = 0.1
    steps: int = 1  # of which only the whole is judged


def model():
    return common.model("llama", num_hidden_layers=1)


def targets(micro):
    return int((micro["labels"][:, 1:] != -100).sum())


def backward(made, batch, fault):
    if fault.batch:
        batch = [fault.batch(micro) for micro in batch]
    whole = sum(map(targets, batch))
    for micro in batch:
        inputs = {key: value for key, value in micro.items() if key != "labels"}
        labels = F.pad(micro["labels"][:, 1:], (0, 1), value=-100)
        loss = F.cross_entropy(made(**inputs).logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (loss / (targets(micro) * len(batch) if fault.mean == "micro" else whole)).backward()


def step(made, optimizer, batch, fault, lr):
    backward(made, batch, fault)
    for name, parameter in made.named_parameters():
        if fault.gradients:
            parameter.grad = fault.gradients(name, parameter.grad, 0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()


def save(made, optimizer, path):
    path.mkdir(parents=True, exist_ok=True)
    state, optimizer_state = get_state_dict(made, optimizer, options=FULL)
    torch.save({"model": state, "optimizer": optimizer_state}, path / "state.pt")


def build(made, what, changes):
    """The optimizer of the run file, with the changes of a fault."""
    own = ("decay", "on_all", "lr", "coarse", "nadam")
    settings = what.settings | {key: value for key, value in changes.items() if key not in own}
    decay, on_all = changes.get("decay", what.decay), changes.get("on_all", False)
    kind = what.kind
    if changes.get("nadam"):
        kind, settings = torch.optim.NAdam, settings | {"decoupled_weight_decay": True}
    return kind(common.groups(made.named_parameters(), decay, on_all), lr=what.lr, **settings)


def write_run(file, name, what):
    keys = {key: list(value) if isinstance(value, tuple) else value for key, value in what.settings.items()}
    keys = {"name": name, "lr": what.lr, "weight_decay": what.decay, "no_decay": ["norm"]} | keys
    text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
    rows = f"micro_batch_size = {common.ROWS}\nglobal_batch_size = {common.ROWS * common.MICRO_ALL}"
    file.write_text(
        f'[model]\npath = "."\n\n[train]\nsteps = {common.STEPS}\n{rows}\n\n[train.optimizer]\n{text}\n\n'
        '[fsdp]\nwrap = ["LlamaDecoderLayer"]\n'
    )


def rate(factor):
    return {"lr": factor}


SGD = {
    "sound": Fault(),
    "rate-half": Fault("learning_rate", factor=0.5, optimizer=rate(0.5)),
    "decay-missing": Fault("weight_decay", r"proj|embed|lm_head", factor=0.0, optimizer={"decay": 0.0}),
    "decay-of-norms": Fault("weight_decay", "norm", optimizer={"on_all": True}),
    "scaled-norms-2": Fault("gradient_scaled", "norm", 2.0, gradients=scaled("norm", 2.0)),
    "prompts-counted": Fault("tokens_counted", batch=faults.prompts_counted),
}
UNDECAYED = {
    "sound": Fault(),
    "rate-half": Fault("gradient_scaled", ".", 0.5, optimizer=rate(0.5)),
}
MOMENTUM = {
    "sound": Fault(),
    "rate-half": Fault("learning_rate", factor=0.5, optimizer=rate(0.5)),
    "decay-half": Fault("weight_decay", r"proj|embed|lm_head", factor=0.5, optimizer={"decay": 0.05}),
    "momentum-less": Fault("update_rule", optimizer={"momentum": 0.8}),
    "dampening": Fault("update_rule", optimizer={"dampening": 0.5}),
    "nesterov": Fault("update_rule", optimizer={"nesterov": True}),
    "mean-of-micro-batches": Fault("loss_mean_of_means", mean="micro"),
}
LION = {
    "sound": Fault(),
    "rate-half": Fault("learning_rate", factor=0.5, optimizer=rate(0.5)),
    "decay-missing": Fault("weight_decay", r"proj|embed|lm_head", factor=0.0, optimizer={"decay": 0.0}),
    "first-beta": Fault("update_rule", optimizer={"betas": (0.95, 0.99)}),
    "second-beta": Fault("update_rule", optimizer={"betas": (0.9, 0.95)}),
    "scaled-all-2": Fault("gradient_scaled", ".", 2.0, gradients=scaled(".", 2.0)),
}
ADAM = {
    "amsgrad": Fault("update_rule", optimizer={"amsgrad": True}),
    "betas": Fault("update_rule", optimizer={"betas": (0.8, 0.99)}),
    "epsilon": Fault("update_rule", factor=300.0, optimizer={"eps": 3e-6}),
    "coarse-weights": Fault("update_rule", optimizer={"coarse": True}),
    "nesterov": Fault("update_rule", optimizer={"nadam": True}),
}
SEVERAL = {
    "sound": Fault(),
    "rate-half": Fault("unexplained", optimizer=rate(0.5)),
    "decay-missing": Fault("unexplained", optimizer={"decay": 0.0}),
    "missing-values": Fault("gradient_missing", "v_proj", 0.0, gradients=faults.none("v_proj")),
    "prompts-counted": Fault("unexplained", batch=faults.prompts_counted),
}

ADAMW = dict(betas=common.BETAS, eps=common.EPS)
OPTIMIZERS = {
    "sgd": Optimizer(torch.optim.SGD, {}, 0.5, SGD),
    "sgd-undecayed": Optimizer(torch.optim.SGD, {}, 0.5, UNDECAYED, decay=0.0),
    "momentum": Optimizer(torch.optim.SGD, dict(momentum=0.9), 0.1, MOMENTUM),
    "nesterov": Optimizer(torch.optim.SGD, dict(momentum=0.9, nesterov=True), 0.1, {"sound": Fault()}),
    "dampened": Optimizer(torch.optim.SGD, dict(momentum=0.9, dampening=0.1), 0.1, {"sound": Fault()}),
    "lion": Optimizer(Lion, dict(betas=(0.9, 0.99)), 1e-3, LION),
    "adamw": Optimizer(torch.optim.AdamW, ADAMW, common.LR, ADAM),
    "several": Optimizer(torch.optim.AdamW, ADAMW, common.LR, SEVERAL, steps=3),
    "several-momentum": Optimizer(torch.optim.SGD, dict(momentum=0.9), 0.1, {"sound": Fault()}, steps=3),
}
NAMES = {torch.optim.SGD: "sgd", Lion: "lion", torch.optim.AdamW: "adamw"}


def case(folder, name, fault, key, what, before):
    made = model()
    optimizer = build(made, what, fault.optimizer)
    made.load_state_dict(before[0].state_dict())
    optimizer.state |= {
        parameter: copy.deepcopy(before[1].state[other])
        for parameter, other in zip(made.parameters(), before[0].parameters())
        if other in before[1].state
    }
    if fault.optimizer.get("amsgrad"):
        for state in optimizer.state.values():
            state["max_exp_avg_sq"] = 1.5 * state["exp_avg_sq"]
    if fault.optimizer.get("nadam"):
        for state in optimizer.state.values():
            growth = torch.arange(1, common.SAVED_AFTER + 1) * 0.004
            state["mu_product"] = (common.BETAS[0] * (1 - 0.5 * 0.96**growth)).prod()
    for at in range(common.SAVED_AFTER, common.SAVED_AFTER + what.steps):
        step(made, optimizer, common.padded(at), fault, what.lr * fault.optimizer.get("lr", 1.0))
    if fault.optimizer.get("coarse"):
        for parameter in made.parameters():
            parameter.data.copy_(parameter.data.bfloat16())
    save(made, optimizer, folder / f"{key}-{name}" / "after")
    more = {"before": f"before-{key}", "steps": what.steps}
    if what.kind is not torch.optim.AdamW:  # which counts the steps itself
        more["at_step"] = common.SAVED_AFTER
    data = "padded" if what.steps == 1 else f"padded-{what.steps}"
    common.expect_case(
        folder, f"{key}-{name}", made, fault.cause, fault.params, fault.factor, data, f"run-{key}.toml", **more
    )


def make(name):
    folder = common.fresh(name)
    common.config("llama", num_hidden_layers=1).save_pretrained(folder)
    for steps in {what.steps for what in OPTIMIZERS.values()}:
        steps_of = range(common.SAVED_AFTER, common.SAVED_AFTER + steps)
        batch = [micro for at in steps_of for micro in common.padded(at)]
        snippets.save_batch(folder / ("padded.safetensors" if steps == 1 else f"padded-{steps}.safetensors"), batch)
    for key, what in OPTIMIZERS.items():
        write_run(folder / f"run-{key}.toml", NAMES[what.kind], what)
        made = model()
        optimizer = build(made, what, {})
        for at in range(common.SAVED_AFTER):
            step(made, optimizer, common.padded(100 + at), Fault(), what.lr)
        save(made, optimizer, folder / f"before-{key}")
        for name, fault in what.cases.items():
            case(folder, name, fault, key, what, (made, optimizer))
