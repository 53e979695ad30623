"""The state of the run of `fsdp2` after ten steps, as torch_xla's FSDP saves it: a file for each of two ranks.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python xla_fsdp.py     (torch 2.9.0, torch_xla 2.9.0, transformers; see README.md)

Collectives on the CPU crash in torch_xla 2.9, so nothing is trained here. Weights and moments are those in
`fsdp2/expected.safetensors`; torch_xla cuts, numbers and saves them. Moments are cut as weights of the same shapes are.
"""

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "2")

import common
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from safetensors.torch import load_file
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP


def wrapped(weights):
    model = common.llama()
    model.load_state_dict(weights)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = FSDP(layer, compute_dtype=torch.float32)
    return FSDP(model, compute_dtype=torch.float32)


def tensors(saved, kind):
    """By name: weights, or one kind of moments."""
    if kind == "weights":
        return {name.removeprefix("model."): tensor for name, tensor in saved.items() if name.startswith("model.")}
    start, end = "optim.state.", f".{kind}"
    named = {name: tensor for name, tensor in saved.items() if name.startswith(start) and name.endswith(end)}
    return {name.removeprefix(start).removesuffix(end): tensor for name, tensor in named.items()}


def rank(index, saved, out):
    model = wrapped(tensors(saved, "weights"))
    optimizer = common.adamw(model)
    moments = {key: list(wrapped(tensors(saved, key)).parameters()) for key in ("exp_avg", "exp_avg_sq")}
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            number = numbers[id(parameter)]
            state = {key: shards[number].detach().clone() for key, shards in moments.items()}
            optimizer.state[parameter] = {"step": torch.tensor(float(common.SAVED_AFTER)), **state}
    state = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata(), "optimizer": optimizer.state_dict()}
    name = f"model_rank-{xr.global_ordinal():08d}-of-{xr.world_size():08d}.pth"
    xm.save(state, str(out / name), master_only=False)


def main():
    saved = load_file(common.FIXTURES / "fsdp2/expected.safetensors")
    torch_xla.launch(rank, args=(saved, common.fresh("xla_fsdp")))


if __name__ == "__main__":
    main()
