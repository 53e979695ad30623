"""Folders of accelerate's `save_state`: FSDP2 with sharded and full state, and plain DDP."""

import tempfile

import common
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict


def rank(rank, out, state_dict_type):
    plugin = None
    if state_dict_type:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            state_dict_type=state_dict_type,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        common.allow_fsdp_on_cpu()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = common.llama()
    optimizer = common.adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    ids = common.tokens(common.SAVED_AFTER)
    for step in range(common.SAVED_AFTER):
        loss = common.loss_of(model, *common.batch(ids, step, rank, common.RANKS))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), common.CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(out, safe_serialization=True)
    options = StateDictOptions(full_state_dict=True)
    state, optimizer_state = get_state_dict(model, optimizer.optimizer, options=options)
    if rank == 0:
        common.expect(f"{out}.expected.safetensors", state, optimizer_state)


def two_optimizers(rank, out):
    """One process, and a second optimizer for the output weights."""
    accelerator = Accelerator(cpu=True)
    model = common.llama()
    head = [model.lm_head.weight]
    body = [parameter for name, parameter in model.named_parameters() if name != "lm_head.weight"]
    optimizers = [torch.optim.AdamW(body, lr=common.LR), torch.optim.SGD(head, lr=common.LR, momentum=0.9)]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    accelerator.backward(common.loss_of(model, *common.batch(common.tokens(1), 0)))
    for optimizer in optimizers:
        optimizer.step()
    accelerator.save_state(out, safe_serialization=True)


def check_merged(out):
    """accelerate's own merge gives the expected weights."""
    expected = load_file(f"{out}.expected.safetensors")
    with tempfile.TemporaryDirectory() as merged:
        merge_fsdp_weights(str(out / "pytorch_model_fsdp_0"), merged)
        for name, tensor in load_file(f"{merged}/model.safetensors").items():
            assert torch.equal(tensor, expected[f"model.{name}"]), name


def main():
    folder = common.fresh("accelerate")
    kinds = {"fsdp2_sharded": "SHARDED_STATE_DICT", "fsdp2_full": "FULL_STATE_DICT", "ddp": None}
    for name, state_dict_type in kinds.items():
        common.run_ranks(rank, folder / name, state_dict_type)
    common.run_ranks(two_optimizers, folder / "two_optimizers", ranks=1)
    check_merged(folder / "fsdp2_sharded")


if __name__ == "__main__":
    main()
