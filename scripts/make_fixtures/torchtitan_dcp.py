"""A folder of torchtitan's own checkpoint manager: parameters at the top, optimizer keys flattened, values of the run."""

import common
import torch.distributed as dist
from fsdp2 import shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig


class TrainState(Stateful):
    """What torchtitan's trainer keeps of itself."""

    def state_dict(self):
        step = common.SAVED_AFTER
        return {"step": step, "ntokens_seen": step * common.GLOBAL_BATCH * common.SEQ}

    def load_state_dict(self, state):
        pass


def optimizers_of(model):
    settings = {"lr": common.LR, "betas": common.BETAS, "eps": common.EPS}
    groups = [
        ParamGroupConfig(
            pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=settings | {"weight_decay": decay}
        )
        for pattern, decay in [(".*norm.*", 0.0), (".*", common.DECAY)]
    ]
    config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    return config.build(model_parts=[model])


def rank(rank, out):
    dist.init_process_group("gloo")
    model = shard(common.llama(), init_device_mesh("cpu", (1,)))
    optimizers = optimizers_of(model)
    schedulers = LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0).build(
        optimizers=optimizers, training_steps=30
    )
    ids = common.tokens(common.SAVED_AFTER)
    for step in range(common.SAVED_AFTER):
        common.train(model, optimizers, ids, [step])
        schedulers.step()
    manager = CheckpointManager.Config(enable=True, folder=".", interval=common.SAVED_AFTER).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": TrainState()},
        sd_adapter=None,
        base_folder=str(out),
    )
    manager.save(common.SAVED_AFTER)
    manager.close()
    options = StateDictOptions(full_state_dict=True)
    (optimizer,) = optimizers
    state, optimizer_state = get_state_dict(model, optimizer, options=options)
    if rank == 0:
        common.expect(out / "expected.safetensors", state, optimizer_state)


def main():
    common.run_ranks(rank, common.fresh("torchtitan"), ranks=1)  # small: each value is a separate item


if __name__ == "__main__":
    main()
