"""Checkpoints of DeepSpeed on two ranks: stages 0 to 3, float32 and bfloat16, tied and frozen parameters, two groups."""

import itertools

import common
import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

# name -> stage, bfloat16 with float32 master weights, tied embeddings and a frozen projection
KINDS = {
    "zero0": (0, False, False),
    "zero0_bf16": (0, True, False),
    "zero1": (1, False, False),
    "zero1_bf16_tied_frozen": (1, True, True),
    "zero2": (2, False, False),
    "zero2_bf16_tied_frozen": (2, True, True),
    "zero3": (3, False, False),
    "zero3_bf16_tied_frozen": (3, True, True),
}


def config(stage, bf16):
    return {
        "train_batch_size": common.GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": common.GLOBAL_BATCH // common.RANKS,
        "gradient_clipping": common.CLIP,
        "bf16": {"enabled": bf16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 1000,
    }


def moment(engine, parameter, key):
    """A moment of a parameter, put together where DeepSpeed maps it to.

    In stages 1 and 2 `safe_get_full_optimizer_state` fails with two parameter groups: DeepSpeed links the moments after the
    first group's step, when the second has none.
    """
    if hasattr(parameter, "ds_id"):
        return safe_get_full_optimizer_state(parameter, key).clone()
    whole, mapping = torch.zeros(parameter.numel()), parameter._hp_mapping
    if mapping is not None:
        optimizer = engine.optimizer.optimizer
        partition = optimizer.param_groups[mapping.param_group_index]["params"][0]
        here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
        fragment = optimizer.state[partition][key].narrow(0, there.start, there.numel)
        whole.narrow(0, here.start, here.numel).copy_(fragment)
    dist.all_reduce(whole)
    return whole.view_as(parameter)


def with_zero(engine, model, out):
    """Stages 1 to 3: weights as zero_to_fp32 loads them, and the state of the optimizer, by name."""
    weights, state = get_fp32_state_dict_from_zero_checkpoint(str(out)), {}
    step = next(iter(engine.optimizer.optimizer.state.values()))["step"]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            keys = ("exp_avg", "exp_avg_sq")
            state[name] = {key: moment(engine, parameter, key) for key in keys} | {"step": step}
        elif name not in weights:  # zero_to_fp32 omits frozen parameters in stage 1
            weights[name] = parameter
    return weights, {"state": state}


def without_zero(engine, model):
    """Stage 0: weights (float32 where bfloat16 is trained) and state of the optimizer, by name."""
    named, optimizer = dict(model.named_parameters()), engine.optimizer
    if hasattr(optimizer, "fp32_groups"):
        masters = zip(itertools.chain(*optimizer.fp16_groups), itertools.chain(*optimizer.fp32_groups))
        masters = {id(parameter): master for parameter, master in masters}
        named = {name: masters[id(parameter)] for name, parameter in named.items()}
        optimizer = optimizer.optimizer
    return named, {"state": {name: optimizer.state[parameter] for name, parameter in named.items()}}


def save(rank, out, stage, bf16, tied_frozen):
    model = common.llama(tied=tied_frozen)
    if tied_frozen:
        model.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=common.adamw(model), config=config(stage, bf16), dist_init_required=False
    )
    ids = common.tokens(common.SAVED_AFTER)
    for step in range(common.SAVED_AFTER):
        loss = common.loss_of(engine, *common.batch(ids, step, rank, common.RANKS))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(out))
    if stage == 0:
        weights, optimizer = without_zero(engine, model)
    else:
        weights, optimizer = with_zero(engine, model, out)
    dist.barrier()
    if rank == 0:
        for copied in ("zero_to_fp32.py", "zero_to_torch.py"):
            (out / copied).unlink(missing_ok=True)
        common.expect(f"{out}.expected.safetensors", weights, optimizer)


def rank(rank, folder):
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise DeepSpeed compiles it first
    deepspeed.init_distributed("gloo")
    for name, settings in KINDS.items():
        save(rank, folder / name, *settings)


def main():
    common.run_ranks(rank, common.fresh("deepspeed"))


if __name__ == "__main__":
    main()
