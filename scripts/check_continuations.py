"""Continues checkpoints of PyTorch with `fsdp train`, and compares the end with PyTorch's own continuation.

    pip install -r scripts/make_fixtures/requirements.txt
    cargo build --release -p fsdp-cli
    python scripts/check_continuations.py target/release/fsdp

Layouts that no golden file holds from before to after: replicas of shards (HSDP), tensor parallelism inside FSDP2, FSDP1's
sharded state, and modules with extra state. Model, data and run file are those of
`make_fixtures/fsdp2.py`, without clipping.
"""

import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "make_fixtures"))

import common  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

SAVED_AFTER, STEPS = 4, 10


class WithExtraState(torch.nn.Linear):
    """As TransformerEngine's modules, which save scales beside their weight."""

    def get_extra_state(self):
        return {"amax": torch.ones(3), "recipe": "delayed"}

    def set_extra_state(self, state):
        pass


def extra_state(model, rank):
    for layer in model.model.layers:
        layer.mlp.gate_proj.__class__ = WithExtraState
    return sharded(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def hsdp(model, rank):
    return sharded(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def tensor_parallel(model, rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer.mlp, mesh["model"], plan)
    return sharded(model, mesh["data"])


def fsdp1(model, rank):
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def sharded(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model, optimizer, ids, steps, rank, world):
    for step in steps:
        common.loss_of(model, *common.batch(ids, step, rank, world)).backward()
        optimizer.step()
        optimizer.zero_grad()


def write(rank, layout, data_ranks, out):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LAYOUTS[layout][0](common.llama(), rank)
    # Ranks of tensor parallelism compute the same samples together.
    data_rank = rank * data_ranks // dist.get_world_size()
    optimizer, ids = common.adamw(model), common.tokens(STEPS)
    train(model, optimizer, ids, range(SAVED_AFTER), data_rank, data_ranks)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=out / "saved")
    train(model, optimizer, ids, range(SAVED_AFTER, STEPS), data_rank, data_ranks)
    end = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        tensors = {name: common.whole(value) for name, value in end.items() if isinstance(value, torch.Tensor)}
        save_file({name: value.clone() for name, value in tensors.items()}, out / "end.safetensors")


# How a layout shards, its ranks, and over how many of them the data are split.
LAYOUTS = {
    "extra_state": (extra_state, 2, 2),
    "hsdp": (hsdp, 4, 4),
    "tensor_parallel": (tensor_parallel, 4, 2),
    "fsdp1": (fsdp1, 2, 2),
}


def resumed(fsdp, out, ranks):
    fixture = common.FIXTURES / "fsdp2"
    settings = [
        f"model.path={fixture}",
        f'data.train=["{fixture}/tokens.bin"]',
        'train.grad_clip="none"',
        f"train.steps={STEPS}",
        f"run.ranks={ranks}",
        f"run.out_dir={out}/ours-{ranks}",
    ]
    command = [fsdp, "train", fixture / "run.toml", "--quiet", "--resume-from", out / "saved"]
    command += [word for setting in settings for word in ["--set", setting]]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(ran.stderr)
    return load_file(out / f"ours-{ranks}/model/model.safetensors")


def main():
    fsdp, worst = sys.argv[1], 0.0
    for layout, (_, ranks, data_ranks) in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder)
            common.run_ranks(write, layout, data_ranks, out, ranks=ranks)
            theirs = load_file(out / "end.safetensors")
            for ours_ranks in [1, 2]:
                ours = resumed(fsdp, out, ours_ranks)
                if ours.keys() != theirs.keys():
                    sys.exit(f"{layout}: names differ: {sorted(ours.keys() ^ theirs.keys())}")
                difference = max((ours[name] - theirs[name]).abs().max().item() for name in ours)
                worst = max(worst, difference)
                print(f"{layout:16} on {ours_ranks} ranks: largest difference {difference:.1e}")
    sys.exit("weights differ" if worst > 1e-5 else 0)


if __name__ == "__main__":
    main()
