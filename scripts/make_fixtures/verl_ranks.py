"""A folder of verl's own checkpoint manager: files per rank of model, optimizer and extra state, and `huggingface/`."""

import common
import torch
import torch.distributed as dist
from fsdp2 import shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager


def rank(rank, out):
    dist.init_process_group("gloo")
    model = shard(common.llama(), init_device_mesh("cpu", (common.RANKS,), mesh_dim_names=("fsdp",)))
    optimizer = common.adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    ids = common.tokens(common.SAVED_AFTER)
    for step in range(common.SAVED_AFTER):
        common.train(model, optimizer, ids, [step], rank, common.RANKS)
        scheduler.step()
    manager = FSDPCheckpointManager(model, optimizer, scheduler)
    manager.save_checkpoint(str(out / "actor"), global_step=common.SAVED_AFTER)
    options = StateDictOptions(full_state_dict=True)
    state, optimizer_state = get_state_dict(model, optimizer, options=options)
    if rank == 0:
        common.expect(out / "expected.safetensors", state, optimizer_state)


def main():
    common.run_ranks(rank, common.fresh("verl"))


if __name__ == "__main__":
    main()
