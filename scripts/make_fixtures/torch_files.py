"""Files and folders of PyTorch alone: wrapped names, one file per rank, two-dimensional meshes, unusual pickles."""

import dataclasses
import datetime
import io
import json
import pathlib

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Net(torch.nn.Module):
    """Two layers with odd numbers of rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.up = torch.nn.Linear(6, 7)
        self.down = torch.nn.Linear(7, 5, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


@dataclasses.dataclass
class Settings:
    """A class of the user."""

    rate: float = 0.5
    layers: tuple = (1, 2)


def wrapped(out):
    """Names that a wrapper has put its own into."""
    torch.save(torch.compile(Net()).state_dict(), out / "compiled.pt")
    torch.save(torch.nn.parallel.DistributedDataParallel(Net()).state_dict(), out / "ddp.pt")
    compiled = torch.compile(Net())
    dcp.save({"model": compiled.state_dict()}, checkpoint_id=out / "compiled_dcp")
    # `state_dict` of these two wrappers removes their names; `named_parameters` of an enclosing module keeps them.
    net = Net()
    net.up = FullyShardedDataParallel(net.up, use_orig_params=True, device_id=torch.device("cpu"))
    with FullyShardedDataParallel.summon_full_params(net.up):
        torch.save({name: p.detach().clone() for name, p in net.named_parameters()}, out / "fsdp1.pt")
    net = Net()
    net.up = checkpoint_wrapper(net.up)
    torch.save({name: p.detach() for name, p in net.named_parameters()}, out / "checkpointed.pt")
    net = torch.compile(torch.nn.parallel.DistributedDataParallel(net))
    torch.save({name: p.detach() for name, p in net.named_parameters()}, out / "all_three.pt")


def fsdp1_rank_files(rank, out, mesh):
    """FSDP1's sharded state, each rank's by `torch.save`."""
    mesh = init_device_mesh("cpu", (common.RANKS,)) if mesh else None
    net = FullyShardedDataParallel(Net(), device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True)
    config = ShardedStateDictConfig(offload_to_cpu=False)
    with FullyShardedDataParallel.state_dict_type(net, StateDictType.SHARDED_STATE_DICT, config):
        torch.save(net.state_dict(), out / f"model_rank_{rank}.pt")


def numbered_shards(rank, out):
    """DTensors of FSDP2 in files that number shards instead of ranks."""
    net = fully_shard(Net(), mesh=init_device_mesh("cpu", (common.RANKS,)))
    torch.save(net.state_dict(), out / f"shard_{rank:05}-of-{common.RANKS:05}.pt")


def steps_of_one_rank(out):
    """DTensors over one rank, in files that number steps."""
    for step in (1, 2):
        net = Net()
        net.up.bias.data += step
        net = fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
        torch.save(net.state_dict(), out / f"step_{step}.pt")


def old_hub(out):
    """The model of `fsdp2` as the hub had it before safetensors: in one file, and in two with an index."""
    model = common.llama()
    state = model.state_dict()
    for folder in ("single", "sharded"):
        (out / folder).mkdir(parents=True)
        model.config.save_pretrained(out / folder)
    torch.save(state, out / "single/pytorch_model.bin")
    file_of = {name: f"pytorch_model-0000{1 + ('mlp' in name)}-of-00002.bin" for name in state}
    for file in sorted(set(file_of.values())):
        torch.save({name: tensor.clone() for name, tensor in state.items() if file_of[name] == file}, out / "sharded" / file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in state.values())}, "weight_map": file_of}
    (out / "sharded/pytorch_model.bin.index.json").write_text(json.dumps(index, indent=1) + "\n")


def two_dimensions(out, kind):
    """Four ranks, two by two: replicas of shards, or tensor parallel inside of FSDP2."""
    names = ("replicate", "shard") if kind == "hsdp" else ("shard", "tensor")
    mesh, net = init_device_mesh("cpu", (2, 2), mesh_dim_names=names), Net()
    if kind == "tp_fsdp2":
        parallelize_module(net, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["shard"]
    fully_shard(net, mesh=mesh)
    state = get_model_state_dict(net)
    dcp.save({"model": state}, checkpoint_id=out / kind)
    writer = HuggingFaceStorageWriter(str(out / f"{kind}_safetensors"), save_distributed=True)
    dcp.save(state, storage_writer=writer)


class WithExtraState(Net):
    """Extra state as a file in memory, which is how Transformer Engine keeps scales of FP8."""

    def get_extra_state(self):
        buffer = io.BytesIO()
        torch.save({"scale": torch.ones(3)}, buffer)
        return buffer

    def set_extra_state(self, state):
        pass


def pickles(out):
    from transformers import TrainingArguments

    net = Net()
    unknown = {
        "model": net.state_dict(),
        "when": datetime.datetime(2026, 1, 2, 3, 4, 5),
        "took": datetime.timedelta(seconds=7),
        "settings": Settings(),
        "arguments": TrainingArguments(output_dir="out", use_cpu=True, report_to=[]),
        "path": pathlib.PurePosixPath("data/train"),
        "step": 3,
    }
    torch.save(unknown, out / "unknown_classes.pt")
    torch.save(WithExtraState().state_dict(), out / "extra_state.pt")
    torch.save({"model": net.state_dict(), "epoch": 1}, out / "under_model.pt")
    torch.save(net.state_dict(), out / "bare.pt")
    matrix = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 3.0]])
    other_kinds = {
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "negated": torch.tensor([1 + 2j]).conj().imag,
        "wide_complex": torch.tensor([1 + 2j], dtype=torch.complex128),
        "sparse": matrix.to_sparse(),
        "sparse_rows": matrix.to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "quantized": torch.quantize_per_tensor(matrix, 0.1, 0, torch.qint8),
        "no_data": torch.empty(2, device="meta"),
    }
    torch.save({"model": net.state_dict(), "other": other_kinds}, out / "other_tensors.pt")
    (out / "before_1_6").mkdir()
    old = out / "before_1_6/pytorch_model.bin"
    torch.save(net.state_dict(), old, _use_new_zipfile_serialization=False)
    assert all(torch.equal(tensor, net.state_dict()[name]) for name, tensor in torch.load(old).items())


def one_rank(rank, out):
    dist.init_process_group("gloo")
    wrapped(out / "wrapped")
    steps_of_one_rank(out / "steps_of_one_rank")


def two_ranks(rank, out):
    dist.init_process_group("gloo")
    fsdp1_rank_files(rank, out / "fsdp1_sharded_tensors", False)
    fsdp1_rank_files(rank, out / "fsdp1_dtensors", True)
    numbered_shards(rank, out / "numbered_shards")


def four_ranks(rank, out):
    dist.init_process_group("gloo")
    two_dimensions(out, "hsdp")
    two_dimensions(out, "tp_fsdp2")


def main():
    out = common.fresh("torch_files")
    common.expect(out / "expected.safetensors", Net().state_dict())
    for folder in ("wrapped", "fsdp1_sharded_tensors", "fsdp1_dtensors", "numbered_shards", "steps_of_one_rank", "pickles"):
        (out / folder).mkdir()
    pickles(out / "pickles")
    old_hub(out / "old_hub")
    for ranks, function in [(1, one_rank), (2, two_ranks), (4, four_ranks)]:
        common.run_ranks(function, out, ranks=ranks)


if __name__ == "__main__":
    main()
