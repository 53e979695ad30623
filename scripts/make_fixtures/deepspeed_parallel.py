"""Checkpoints of DeepSpeed that cut a model by more than its data: a pipeline of two stages, and experts on two ranks."""

import common
import deepspeed
import deepspeed.ops
import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import PipelineModule

CONFIG = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": False},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 1000,
}


def pipeline(out):
    """Two stages of two layers each; a file for each layer."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(6, 7), torch.nn.ReLU(), torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)]
    net = PipelineModule(layers=layers, num_stages=common.RANKS, loss_fn=F.mse_loss, partition_method="uniform")
    optimizer = torch.optim.AdamW(net.parameters(), lr=common.LR)
    config = CONFIG | {"train_micro_batch_size_per_gpu": 4}
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config, dist_init_required=False)
    data = iter([(torch.randn(4, 6), torch.randn(4, 3)) for _ in range(2)])
    for _ in range(2):
        engine.train_batch(data_iter=data)
    engine.save_checkpoint(str(out))


class Experts(torch.nn.Module):
    """Two experts, one on each rank, between two layers that all ranks have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.up = torch.nn.Linear(6, 8)
        self.experts = MoE(hidden_size=8, expert=torch.nn.Linear(8, 8), num_experts=2, ep_size=common.RANKS, k=1)
        self.down = torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.down(self.experts(self.up(x))[0])


def experts(rank, out):
    net = Experts()
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(net.parameters()), "name": "all"})
    optimizer = torch.optim.AdamW(groups, lr=common.LR)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=CONFIG, dist_init_required=False)
    torch.manual_seed(rank)
    for _ in range(2):
        engine.backward(F.mse_loss(engine(torch.randn(2, 4, 6)), torch.zeros(2, 4, 3)))
        engine.step()
    engine.save_checkpoint(str(out))


def rank(rank, kind, out):
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise DeepSpeed compiles it first
    deepspeed.init_distributed("gloo")
    pipeline(out) if kind == "pipeline" else experts(rank, out)


def main():
    folder = common.fresh("deepspeed_parallel")
    # Separate processes: DeepSpeed keeps a single topology per process.
    for kind in ("pipeline", "experts"):
        common.run_ranks(rank, kind, folder / kind)
    for copied in [*folder.rglob("zero_to_fp32.py"), *folder.rglob("zero_to_torch.py")]:
        copied.unlink()


if __name__ == "__main__":
    main()
