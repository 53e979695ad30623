"""A training run of FSDP2 on two ranks: saved after 10 steps in every layout of `get_state_dict`, then 20 steps more."""

import json

import common
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SAVED_AFTER, STEPS = common.SAVED_AFTER, 30
RUN = f"""\
# The run of expected.json from its beginning (model.safetensors), for `fsdp train` in this folder.

[model]
path = "."
init = "pretrained"

[data]
train = ["tokens.bin"]
format = "tokens-u16"
packing = "stream"
seq_len = {common.SEQ}
shuffle = false

[train]
steps = {STEPS}
micro_batch_size = 2
global_batch_size = {common.GLOBAL_BATCH}
grad_clip = {common.CLIP}
lr_schedule = {{ name = "constant" }}

[train.optimizer]
name = "adamw"
lr = {common.LR}
betas = {list(common.BETAS)}
eps = {common.EPS}
weight_decay = {common.DECAY}
no_decay = ["norm"]

[fsdp]
wrap = ["LlamaDecoderLayer"]

[run]
ranks = {common.RANKS}
out_dir = "out"
"""


def shard(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def rank(rank, out):
    dist.init_process_group("gloo")
    ids = common.tokens(STEPS)
    model = shard(common.llama(), init_device_mesh("cpu", (common.RANKS,)))
    optimizer = common.adamw(model)
    measured = common.train(model, optimizer, ids, range(SAVED_AFTER), rank, common.RANKS)
    for layout, flat in [("dcp", False), ("dcp_flat", True)]:
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        state, optimizer_state = get_state_dict(model, optimizer, options=options)
        dcp.save({"model": state, "optim": optimizer_state}, checkpoint_id=out / layout)
    full = StateDictOptions(full_state_dict=True)
    state, optimizer_state = get_state_dict(model, optimizer, options=full)
    if rank == 0:
        common.expect(out / "expected.safetensors", state, optimizer_state)
    after = common.train(model, optimizer, ids, range(SAVED_AFTER, STEPS), rank, common.RANKS)
    state = get_model_state_dict(model, options=full)
    if rank == 0:
        common.expect(out / "expected_end.safetensors", state)
        losses, norms = (first + then for first, then in zip(measured, after))
        expected = {"saved_after": SAVED_AFTER, "losses": losses, "grad_norms": norms}
        (out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def main():
    out = common.fresh("fsdp2")
    common.llama().save_pretrained(out)
    (out / "generation_config.json").unlink()
    common.tokens(STEPS).tofile(out / "tokens.bin")
    (out / "run.toml").write_text(RUN)
    common.run_ranks(rank, out)


if __name__ == "__main__":
    main()
