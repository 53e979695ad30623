"""Mixtral and Qwen3-MoE as transformers 5 holds them, with the experts of a layer stacked in two tensors.

For each, `model/` has the initial weights under their published names, `fused/` the same as in memory, `dcp/` the state
after 3 steps by name (the parameter groups with it), and `expected_end.safetensors` the weights after 3 steps more.
The data are those of `fsdp2.py`, and so is the run file, but for the model.
"""

import common
import torch
import torch.distributed.checkpoint as dcp

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


def write(kind):
    import transformers

    out = common.fresh("fused_experts", kind)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config(kind), experts_implementation="eager").float()
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
    common.train(model, optimizer, ids, range(SAVED_AFTER, STEPS))
    common.expect(out / "expected_end.safetensors", model.state_dict())


def main():
    for kind in ["mixtral", "qwen3_moe"]:
        write(kind)


if __name__ == "__main__":
    main()
