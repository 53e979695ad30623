"""Mixtral and Qwen3-MoE with stacked experts under DeepSpeed, on two ranks: saved after 3 steps, in stages 0, 2 and 3.

`expected_end.safetensors` has the weights after 3 steps more. The models, their configurations and their data are those of
`fused_experts.py`.
"""

import common
import deepspeed
import deepspeed.ops
from deepspeed_zero import config
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from fused_experts import SAVED_AFTER, STEPS, model_of
from torch import distributed as dist

STAGES = [0, 2, 3]


def save(rank, out, kind, stage):
    model = model_of(kind)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=common.adamw(model), config=config(stage, bf16=False), dist_init_required=False
    )
    ids = common.tokens(STEPS)

    def train(steps):
        for step in steps:
            engine.backward(common.loss_of(engine, *common.batch(ids, step, rank, common.RANKS)))
            engine.step()

    train(range(SAVED_AFTER))
    engine.save_checkpoint(str(out))
    train(range(SAVED_AFTER, STEPS))
    end = out / "end"
    engine.save_checkpoint(str(end))
    dist.barrier()
    if rank == 0:
        weights = get_fp32_state_dict_from_zero_checkpoint(str(end)) if stage else model.state_dict()
        common.expect(out / "expected_end.safetensors", weights)
        common.shutil.rmtree(end)
        for copied in ("zero_to_fp32.py", "zero_to_torch.py"):
            (out / copied).unlink(missing_ok=True)
    dist.barrier()


def rank(rank, folder):
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise DeepSpeed compiles it first
    deepspeed.init_distributed("gloo")
    for kind in ["mixtral", "qwen3_moe"]:
        for stage in STAGES:
            save(rank, folder / f"{kind}_zero{stage}", kind, stage)


def main():
    common.run_ranks(rank, common.fresh("deepspeed_experts"))


if __name__ == "__main__":
    main()
