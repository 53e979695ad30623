"""Runs in which the optimizer has not updated all parameters in all steps: some had no gradient at first, some never, and
AdamW's count of one was set to 0 although it has moments, as after loading a state whose counts were reset.

Each is saved after 10 steps, by name (DCP) and by number (`torch.save` of `state_dict`), then every parameter gets
gradients for 5 steps more. The model, its data and its run file are those of `fsdp2.py`.
"""

import common
import torch
import torch.distributed.checkpoint as dcp

STEPS = common.SAVED_AFTER + 5
# Never updated before the save: its state is absent.
FRESH = ["model.layers.0.self_attn.k_proj.weight", "model.layers.0.input_layernorm.weight"]
# Updated only from this step (from 0) on.
LATE = {"model.layers.0.mlp.up_proj.weight": 4, "lm_head.weight": 9}
# Counted from 0 again at the save.
RESET = "model.layers.0.mlp.down_proj.weight"


def steps(model, optimizer, ids, numbers):
    for step in numbers:
        common.loss_of(model, *common.batch(ids, step)).backward()
        for name, parameter in model.named_parameters():
            begin = common.SAVED_AFTER if name in FRESH else LATE.get(name, 0)
            if step < begin:
                parameter.grad = None
        torch.nn.utils.clip_grad_norm_(model.parameters(), common.CLIP)
        optimizer.step()
        optimizer.zero_grad()


def by_name(model, optimizer):
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {names[parameter]: dict(states) for parameter, states in optimizer.state.items()}
    groups = [{**group, "params": [names[one] for one in group["params"]]} for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def write(out, model, optimizer):
    ids = common.tokens(STEPS)
    steps(model, optimizer, ids, range(common.SAVED_AFTER))
    state = optimizer.state[dict(model.named_parameters())[RESET]]
    if "step" in state:
        state["step"] = torch.zeros_like(state["step"])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out / "numbered.pt")
    # What TransformerEngine's modules return from `get_extra_state`, beside their weights.
    extra = {"model.layers.0.mlp.gate_proj._extra_state.amax": torch.ones(3)}
    state = {"model": {**model.state_dict(), **extra}, "optim": by_name(model, optimizer)}
    dcp.save(state, checkpoint_id=out / "dcp", no_dist=True)
    steps(model, optimizer, ids, range(common.SAVED_AFTER, STEPS))
    common.expect(out / "expected_end.safetensors", model.state_dict())


def main():
    adamw = common.llama()
    write(common.fresh("late_states", "adamw"), adamw, common.adamw(adamw))
    sgd = common.llama()
    groups = common.groups(sgd)
    settings = {"lr": common.LR, "momentum": 0.9, "dampening": 0.5}
    write(common.fresh("late_states", "sgd"), sgd, torch.optim.SGD(groups, **settings, foreach=False))


if __name__ == "__main__":
    main()
