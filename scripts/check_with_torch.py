#!/usr/bin/env python3
"""Checks `fsdp ckpt convert` against real PyTorch, in both directions.

    python scripts/check_with_torch.py target/release/fsdp

Needs torch >= 2.8; checks what transformers and zstandard read too where these are installed. Makes checkpoints
with PyTorch (and takes the project's fixtures), converts them, loads the results with PyTorch and compares every
tensor bit for bit and every value. Exits with 1 when anything differs.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

warnings.simplefilter("ignore")
FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "crates/fsdp-ckpt/tests/fixtures"
DTYPES = (
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
).split()
RANKS = 2


# ---------------------------------------------------------------- states


class Net(torch.nn.Module):
    """Rows that do not divide evenly, a tensor with fewer rows than ranks, buffers, two dtypes."""

    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Embedding(37, 6)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
        self.head = torch.nn.Linear(6, 3, bias=False).to(torch.bfloat16)
        self.tail = torch.nn.Parameter(torch.full((1,), 0.25))
        self.register_buffer("steps_seen", torch.tensor(7))

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head((x + self.tail).to(torch.bfloat16)).float()


def trained():
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    for _ in range(2):
        net(torch.arange(37)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def extras():
    """Tensors of every dtype and shape, and values of every kind."""
    torch.manual_seed(2)
    tensors = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        bits = torch.randint(0, 2 if dtype == torch.bool else 100, (5, 3 * dtype.itemsize), dtype=torch.uint8)
        tensors[name] = bits.view(dtype)
    return {
        "tensors": tensors,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "list": [torch.arange(3), {"k": torch.ones(2)}],
        "step": 2,
        "big": 2**80,
        "negative": -(2**40),
        "rate": 0.1,
        "text": "tiny-é☃",
        "blob": bytes(range(256)),
        "nothing": None,
        "flags": [True, False],
        "nested": (1, (2.0, "x"), [None]),
        "set": {1, 2},
    }


def full_state():
    net, optimizer = trained()
    model, optim = get_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
    return {"model": dict(model), "optim": optim, "extra": extras()}


def save_sharded(rank, out, kind):
    """One rank of a run that saves the training state with DCP."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["CHECK_PORT"])
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    reference, reference_optimizer = trained()
    options = StateDictOptions(full_state_dict=True)
    model, optim = get_state_dict(reference, reference_optimizer, options=options)
    shape, names = ((RANKS, 1), ("replicate", "shard")) if kind == "hsdp" else ((RANKS,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    net = Net()
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net.head, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=optim, options=options)
    model, optim = get_state_dict(net, optimizer)
    settings = {"threads": {"thread_count": 3}, "files": {"single_file_per_rank": False}}.get(kind, {})
    if kind == "zstd":
        from torch.distributed.checkpoint._extension import ZStandard

        settings["_extensions"] = [ZStandard()]
    dcp.save(
        {"model": model, "optim": optim, "extra": extras()},
        storage_writer=dcp.FileSystemWriter(out, **settings),
    )
    dist.barrier()
    dist.destroy_process_group()


def load_sharded(rank, path, expected_path, flat):
    """One rank of a run that loads the model into FSDP2 shards and compares them."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["CHECK_PORT"])
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.manual_seed(9)
    net = Net()
    for block in net.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (RANKS,)))
    fully_shard(net, mesh=init_device_mesh("cpu", (RANKS,)))
    state = {"model": net.state_dict()}
    reader = dcp.HuggingFaceStorageReader(path) if flat else None
    target = {f"model.{name}": tensor for name, tensor in state["model"].items()} if flat else state
    dcp.load(target, storage_reader=reader, checkpoint_id=None if flat else path)
    expected = torch.load(expected_path, weights_only=True)["model"]
    for name, tensor in state["model"].items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert bits(whole) == bits(expected[name]), name
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(function, *args):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["CHECK_PORT"] = str(probe.getsockname()[1])
    mp.spawn(function, args=args, nprocs=RANKS)


# ---------------------------------------------------------------- comparing


def bits(tensor):
    tensor = tensor.detach().cpu().contiguous()
    return (str(tensor.dtype), tuple(tensor.shape), bytes(tensor.reshape(-1).view(torch.uint8).numpy()))


def flat(state):
    return flatten_state_dict(state)[0]


def differences(expected, got):
    """What differs between two nested states, by flat name."""
    expected, got = flat(expected), flat(got)
    found = [f"missing {name}" for name in expected if name not in got]
    found += [f"extra {name}" for name in got if name not in expected]
    for name in expected.keys() & got.keys():
        one, other = expected[name], got[name]
        if isinstance(one, torch.Tensor):
            same = isinstance(other, torch.Tensor) and bits(one) == bits(other)
        else:
            same = type(one) is type(other) and one == other
        if not same:
            found.append(f"{name} differs")
    return found


def must_equal(expected, got):
    found = differences(expected, got)
    if found:
        raise AssertionError(f"{len(found)} differences: " + "; ".join(sorted(found)[:8]))


def read_dcp(path):
    """All of a DCP directory, through PyTorch's own converter."""
    with tempfile.TemporaryDirectory() as scratch:
        dcp_to_torch_save(path, f"{scratch}/state.pth")
        return torch.load(f"{scratch}/state.pth", weights_only=True)


# ---------------------------------------------------------------- checks


class Checks:
    def __init__(self, binary, scratch):
        self.binary, self.scratch = os.path.abspath(binary), pathlib.Path(scratch)
        self.passed, self.failed, self.count = 0, [], 0

    def convert(self, source, to, *options, suffix=""):
        """The path of the converted checkpoint."""
        self.count += 1
        out = self.scratch / f"out-{self.count}{suffix}"
        command = [self.binary, "ckpt", "convert", str(source), str(out), "--to", to, *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise AssertionError(f"{' '.join(command)} failed: {done.stderr.strip()[-600:]}")
        return str(out)

    def check(self, what, function, *args):
        try:
            function(*args)
        except Exception as error:  # a failed check does not stop the others
            self.failed.append(what)
            print(f"FAILED  {what}: {error}")
            if not isinstance(error, AssertionError):
                traceback.print_exc()
        else:
            self.passed += 1
            print(f"ok      {what}")

    # From PyTorch.

    def to_torch(self, source, expected):
        got = torch.load(self.convert(source, "torch", suffix=".pth"), weights_only=True)
        must_equal(expected, got)

    def to_safetensors(self, source, expected):
        from safetensors import safe_open

        out = self.convert(source, "safetensors", "--only", "all", suffix=".safetensors")
        tensors = {name: tensor for name, tensor in flat(expected).items() if isinstance(tensor, torch.Tensor)}
        with safe_open(out, "pt") as file:
            assert (file.metadata() or {}).get("format") == "pt", "no `format: pt`"
            must_equal(tensors, {name: file.get_tensor(name) for name in file.keys()})

    # To PyTorch.

    def to_dcp(self, source, expected, ranks):
        must_equal(expected, read_dcp(self.convert(source, "dcp", "--world-size", str(ranks))))

    def dcp_in_place(self, source, expected):
        """Loading into existing tensors and values, without a process group."""
        out = self.convert(source, "dcp", "--world-size", "3")
        blank = lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else None
        target = {name: blank(leaf) for name, leaf in flat(expected).items()}
        dcp.load(target, checkpoint_id=out, no_dist=True)
        must_equal(flat(expected), target)

    def dcp_sharded(self, source, state_file):
        run_ranks(load_sharded, self.convert(source, "dcp", "--world-size", "3"), state_file, False)

    def to_native(self, source, expected, ranks):
        out = self.convert(source, "native", "--world-size", str(ranks))
        tensors = {name: leaf for name, leaf in flat(expected).items() if isinstance(leaf, torch.Tensor)}
        # Tensors without elements have no rows, so files that hold rows cannot hold them.
        tensors = {name: leaf for name, leaf in tensors.items() if leaf.numel()}
        target = {name: torch.zeros_like(leaf).contiguous() for name, leaf in tensors.items()}
        dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(out), no_dist=True)
        must_equal(tensors, target)
        must_equal(expected, torch.load(self.convert(out, "torch", suffix=".pth"), weights_only=True))

    def native_sharded(self, source, state_file):
        out = self.convert(source, "native", "--world-size", "3", "--only", "model")
        run_ranks(load_sharded, out, state_file, True)

    def tied(self):
        weight = torch.randn(4, 3)
        torch.save({"emb": weight, "head": weight}, self.scratch / "tied.pth")
        out = self.convert(self.scratch / "tied.pth", "torch", suffix=".pth")
        got = torch.load(out, weights_only=True)
        assert got["emb"].data_ptr() == got["head"].data_ptr(), "the storage is not shared"
        must_equal({"emb": weight, "head": weight}, got)

    def llama(self):
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=True,
        )
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config).eval()
        source = self.scratch / "llama"
        model.save_pretrained(source)
        sharded = self.convert(source, "dcp", "--world-size", "3")
        out = self.convert(sharded, "safetensors", "--config", str(source / "config.json"))
        ids = torch.arange(12).reshape(1, 12)
        with torch.no_grad():
            got = AutoModelForCausalLM.from_pretrained(out).eval()(ids).logits
            assert torch.equal(model(ids).logits, got), "logits differ"


def check_source(checks, name, source, expected):
    checks.check(f"{name} -> torch file", checks.to_torch, source, expected)
    checks.check(f"{name} -> safetensors", checks.to_safetensors, source, expected)
    checks.check(f"{name} -> DCP of 3 ranks", checks.to_dcp, source, expected, 3)


def check_all(checks):
    scratch, state = checks.scratch, full_state()
    torch.save(state, scratch / "state.pth")
    # The return value of `state_dict`: an OrderedDict with versions in an attribute.
    torch.save(trained()[0].state_dict(), scratch / "module.pth")

    check_source(checks, "torch file", scratch / "state.pth", state)
    checks.check("module.state_dict() -> torch file", checks.to_torch, scratch / "module.pth", dict(state["model"]))
    checks.check("tied tensors", checks.tied)
    for ranks in (1, 2, 5, 40):
        checks.check(f"DCP of {ranks} ranks", checks.to_dcp, scratch / "state.pth", state, ranks)
    checks.check("DCP loads in place", checks.dcp_in_place, scratch / "state.pth", state)
    checks.check("DCP loads into FSDP2", checks.dcp_sharded, scratch / "state.pth", scratch / "state.pth")
    plain = {**state, "extra": {"scalar": state["extra"]["scalar"], "step": 2}}
    torch.save(plain, scratch / "plain.pth")
    for ranks in (1, 3):
        what = f"native directory of {ranks} ranks"
        checks.check(what, checks.to_native, scratch / "plain.pth", plain, ranks)
    checks.check("native loads into FSDP2", checks.native_sharded, scratch / "plain.pth", scratch / "plain.pth")

    kinds = ["plain", "hsdp", "threads", "files"]
    try:
        import zstandard  # noqa: F401

        kinds.append("zstd")
    except ImportError:
        print("skipped DCP with zstd: zstandard is not installed")
    for kind in kinds:
        out = str(scratch / f"dcp-{kind}")
        run_ranks(save_sharded, out, kind)
        # Saving through FSDP2 turns some tuples of the optimizer into lists, so PyTorch's reading is the reference.
        expected = read_dcp(out)
        must_equal(state["model"], expected["model"])
        check_source(checks, f"DCP ({kind})", out, expected)

    for source in sorted(FIXTURES.glob("dcp_*")) + sorted(FIXTURES.glob("fsdp1/sharded*")):
        # PyTorch needs zstandard to read the compressed fixture, which has the same values as the plain one.
        readable = FIXTURES / "dcp_2rank" if "zstd" in source.name else source
        check_source(checks, f"fixture {source.name}", source, read_dcp(readable))
    full = FIXTURES / "full.pth"
    if full.exists():
        check_source(checks, "fixture full.pth", full, torch.load(full, weights_only=True))
    try:
        import transformers  # noqa: F401

        checks.check("a Llama through DCP and back", checks.llama)
    except ImportError:
        print("skipped Llama: transformers is not installed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", help="the fsdp program")
    binary = parser.parse_args().binary
    with tempfile.TemporaryDirectory() as scratch:
        checks = Checks(binary, scratch)
        check_all(checks)
    print(json.dumps({"torch": torch.__version__, "passed": checks.passed, "failed": checks.failed}))
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
