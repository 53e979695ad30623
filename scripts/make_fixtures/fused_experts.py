"""Mixtral and Qwen3-MoE as transformers 5 holds them, with the experts of a layer stacked in two tensors.

For each, `model/` has the initial weights under their published names, `fused/` the same as in memory, `dcp/` the state
after 3 steps by name (the parameter groups with it), and `expected_end.safetensors` the weights after 3 steps more.
The same state by number: `numbered.pt` as in memory, and `separate.pt` as transformers 4 saved it, whose modules held
each expert alone (made here of the stacks). `checkpoint-3/` is of transformers' Trainer, which publishes weights one by
one and numbers the moments of the stacks. The data are those of `fsdp2.py`, and so is the run file, but for the model.
"""

import shutil

import common
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from trainer import made

SAVED_AFTER, STEPS = 3, 6


def config(kind):
    import transformers

    values = common.llama_config().to_dict()
    for key in ["model_type", "architectures", "transformers_version", "mlp_bias", "attention_bias"]:
        values.pop(key, None)
    if kind == "mixtral":
        return transformers.MixtralConfig(**values, num_local_experts=3, num_experts_per_tok=2, sliding_window=None)
    return transformers.Qwen3MoeConfig(
        **values, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=5, norm_topk_prob=True
    )


def model_of(kind):
    import transformers

    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config(kind), experts_implementation="eager").float()


def separate(kind, model, optimizer):
    """The state by the numbers of modules that hold each expert alone, after the router."""
    words = ["w1", "w2", "w3"] if kind == "mixtral" else ["gate_proj", "up_proj", "down_proj"]
    parts, order = {}, []
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        if ".experts." not in name:
            parts[name] = {key: value.clone() for key, value in state.items()}
            order += [name] * (".gate." not in name)
            continue
        module, stack = name.rsplit(".", 1)
        if stack == "down_proj":
            continue
        down = optimizer.state[dict(model.named_parameters())[f"{module}.down_proj"]]
        order.append(f"{module.removesuffix('experts')}gate.weight")
        for expert in range(parameter.shape[0]):
            for word in words:
                held = down if word in ["w2", "down_proj"] else state
                rows = {"w1": (0, 2), "gate_proj": (0, 2), "w3": (1, 2), "up_proj": (1, 2)}.get(word, (0, 1))

                def cut(value):
                    return value[expert].chunk(rows[1])[rows[0]].clone() if value.dim() else value.clone()

                order.append(f"{module}.{expert}.{word}.weight")
                parts[order[-1]] = {key: cut(value) for key, value in held.items()}
    groups, numbers = [], []
    for group, is_norm in zip(optimizer.param_groups, [False, True]):
        names = [name for name in order if ("norm" in name) == is_norm]
        groups.append({**group, "params": list(range(len(numbers), len(numbers) + len(names)))})
        numbers += names
    return {"state": {number: parts[name] for number, name in enumerate(numbers)}, "param_groups": groups}


def trainer(rank, kind, out):
    made(out / "trainer", 1, model_of(kind), save_steps=SAVED_AFTER, max_steps=SAVED_AFTER).train()
    folder = f"checkpoint-{SAVED_AFTER}"
    (out / folder).mkdir()
    for name in ["model.safetensors", "config.json", "optimizer.pt", "trainer_state.json"]:
        shutil.copy(out / "trainer" / folder / name, out / folder / name)
    shutil.rmtree(out / "trainer")


def write(kind):
    out = common.fresh("fused_experts", kind)
    model = model_of(kind)
    model.save_pretrained(out / "model")
    model.save_pretrained(out / "fused", save_original_format=False)
    for folder in ["model", "fused"]:
        (out / folder / "generation_config.json").unlink(missing_ok=True)
    ids = common.tokens(STEPS)
    optimizer = common.adamw(model)
    common.train(model, optimizer, ids, range(SAVED_AFTER))
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [{**group, "params": [names[one] for one in group["params"]]} for group in optimizer.param_groups]
    optim = {**common.by_name(model, optimizer), "param_groups": groups}
    dcp.save({"model": model.state_dict(), "optim": optim}, checkpoint_id=out / "dcp", no_dist=True)
    numbered = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(numbered, out / "numbered.pt")
    model.save_pretrained(out / "published")
    published = load_file(out / "published/model.safetensors")
    shutil.rmtree(out / "published")
    torch.save({"model": published, "optimizer": separate(kind, model, optimizer)}, out / "separate.pt")
    common.train(model, optimizer, ids, range(SAVED_AFTER, STEPS))
    common.expect(out / "expected_end.safetensors", model.state_dict())


def main():
    for kind in ["mixtral", "qwen3_moe"]:
        write(kind)
        common.run_ranks(trainer, kind, common.FIXTURES / "fused_experts" / kind, ranks=1)


if __name__ == "__main__":
    main()
