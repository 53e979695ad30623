"""States of a model with LoRA adapters of peft, one module trained in full beside them, after 4 steps.

`dcp/` is of FSDP2 on two ranks, by name and with the base; `numbered.pt` is of one process, by number and with the base;
`checkpoint-4/` is of transformers' Trainer, by number and without the base, and `fsdp2/checkpoint-4/` of the Trainer with FSDP2
on two ranks, by name and without the base. `expected_end.safetensors` has the adapters
after 4 steps more. The base, the data and the run file are those of `fsdp2.py`.
"""

import shutil

import common
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from trainer import StopAfter, made

SAVED_AFTER, STEPS = 4, 8


def adapted():
    config = LoraConfig(
        r=2,
        lora_alpha=3,
        use_rslora=True,
        target_modules=["q_proj", "v_proj", "down_proj"],
        modules_to_save=["lm_head"],
        task_type="CAUSAL_LM",
    )
    model = common.llama()
    torch.manual_seed(5)
    return get_peft_model(model, config)


def adamw(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        trained, lr=common.LR, betas=common.BETAS, eps=common.EPS, weight_decay=common.DECAY, foreach=False
    )


def expect(path, model):
    """The names of peft, which are those that a run exports."""
    tensors = get_peft_model_state_dict(model)
    save_file({name: common.whole(tensor).clone() for name, tensor in tensors.items()}, path)


def one_process(rank, out):
    model = adapted()
    optimizer, ids = adamw(model), common.tokens(STEPS)
    common.train(model, optimizer, ids, range(SAVED_AFTER))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out / "numbered.pt")
    common.train(model, optimizer, ids, range(SAVED_AFTER, STEPS))
    expect(out / "expected_end.safetensors", model)


def sharded(rank, out):
    model = adapted()
    mesh = torch.distributed.init_device_mesh("cpu", (common.RANKS,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, ids = adamw(model), common.tokens(STEPS)
    common.train(model, optimizer, ids, range(SAVED_AFTER), rank, common.RANKS)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=out / "dcp")


def trainer_fsdp2(rank, out):
    config = {
        "version": 2,
        "state_dict_type": "SHARDED_STATE_DICT",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    }
    common.allow_fsdp_on_cpu()
    settings = {"fsdp": True, "fsdp_config": config, "save_steps": SAVED_AFTER, "max_steps": STEPS}
    one = made(out / "fsdp2", common.RANKS, adapted(), **settings)
    one.add_callback(StopAfter(SAVED_AFTER))
    one.train()
    torch.distributed.barrier()
    if rank == 0:
        for file in (out / "fsdp2").glob("checkpoint-*/*.*"):
            if file.name != "trainer_state.json":
                file.unlink()


def trainer(rank, out):
    one = made(out / "trainer", 1, adapted(), save_steps=SAVED_AFTER, max_steps=STEPS)
    one.add_callback(StopAfter(SAVED_AFTER))
    one.train()
    # Of what the Trainer saves, all that a continuation uses.
    folder = f"checkpoint-{SAVED_AFTER}"
    (out / folder).mkdir()
    for name in ["adapter_model.safetensors", "adapter_config.json", "optimizer.pt", "trainer_state.json"]:
        shutil.copy(out / "trainer" / folder / name, out / folder / name)
    shutil.rmtree(out / "trainer")


def main():
    out = common.fresh("lora_states")
    common.run_ranks(one_process, out, ranks=1)
    common.run_ranks(sharded, out)
    common.run_ranks(trainer, out, ranks=1)
    common.run_ranks(trainer_fsdp2, out)


if __name__ == "__main__":
    main()
