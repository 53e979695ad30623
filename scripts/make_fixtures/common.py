"""What the scripts share: one tiny Llama, its data, its optimizer, processes, and files of expected values."""

import os
import pathlib
import shutil
import socket
import warnings

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from safetensors.torch import save_file

warnings.simplefilter("ignore")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)

FIXTURES = pathlib.Path(__file__).resolve().parents[2] / "crates/fsdp-ckpt/tests/fixtures"
VOCAB = 33
SEQ = 16
GLOBAL_BATCH = 4
RANKS = 2
LR, BETAS, EPS, DECAY, CLIP = 1e-2, (0.9, 0.95), 1e-8, 0.1, 1.0


def fresh(*parts):
    """An empty folder below the fixtures."""
    path = FIXTURES.joinpath(*parts)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


# The model and its data


def llama_config(tied=False):
    """Odd sizes: ranks hold different numbers of rows, and DeepSpeed must pad its partitions."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=9,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=SEQ,
        rms_norm_eps=1e-5,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        use_cache=False,
    )


def llama(seed=0, tied=False):
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(tied)).float()


def tokens(steps):
    """Ids of `steps` global batches: a walk in which the next id is one of three."""
    generator = torch.Generator().manual_seed(3)
    jumps = torch.tensor([1, 2, 9])[torch.randint(0, 3, (steps * GLOBAL_BATCH * SEQ,), generator=generator)]
    ids = [5]
    for jump in jumps.tolist():
        ids.append((3 * ids[-1] + jump) % VOCAB)
    return numpy.array(ids, dtype="<u2")


def batch(ids, step, rank=0, world=1):
    """Inputs and targets of a step (from 0) on a rank, as `shuffle = false` and packing "stream" deal them."""
    rows = GLOBAL_BATCH // world
    first = step * GLOBAL_BATCH + rank * rows
    samples = [ids[row * SEQ : row * SEQ + SEQ + 1].astype("int64") for row in range(first, first + rows)]
    samples = torch.from_numpy(numpy.stack(samples))
    return samples[:, :-1], samples[:, 1:]


def loss_of(model, inputs, targets):
    logits = model(input_ids=inputs).logits
    return F.cross_entropy(logits.float().reshape(-1, VOCAB), targets.reshape(-1))


def groups(model):
    """Two parameter groups: weights of norms do not decay."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for name, parameter in named if "norm" not in name], "weight_decay": DECAY},
        {"params": [parameter for name, parameter in named if "norm" in name], "weight_decay": 0.0},
    ]


def adamw(model):
    return torch.optim.AdamW(groups(model), lr=LR, betas=BETAS, eps=EPS, foreach=False, fused=False)


# Number of steps after which the runs save; all use the same data and initial weights.
SAVED_AFTER = 10


def train(model, optimizer, ids, steps, rank=0, world=1, clip=CLIP):
    """Steps of one process; loss (mean over all ranks) and gradient norm of each."""
    losses, norms = [], []
    for step in steps:
        loss = loss_of(model, *batch(ids, step, rank, world))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if world > 1:
            dist.all_reduce(loss)
        losses.append(loss.item() / world)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
    return losses, norms


# Processes


def run_ranks(function, *arguments, ranks=RANKS):
    """`function(rank, ...)` in new processes that have the environment of torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (ranks, port, function, arguments), nprocs=ranks)


def _rank(rank, ranks, port, function, arguments):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "ACCELERATE_USE_CPU": "true",
    }
    torch.set_num_threads(1)
    function(rank, *arguments)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def allow_fsdp_on_cpu():
    """accelerate takes FSDP for GPUs only; nothing that it writes depends on that."""
    from accelerate.state import AcceleratorState, DistributedType

    init = AcceleratorState.__init__

    def with_fsdp(self, *arguments, fsdp_plugin=None, **settings):
        init(self, *arguments, fsdp_plugin=fsdp_plugin, **settings)
        self.__dict__.setdefault("fsdp_plugin", fsdp_plugin)
        self.distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = with_fsdp


# Expected values


def whole(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().cpu()


def named_state(optimizer_state):
    """`{"state": {name: {key: tensor}}}` as `optim.state.<name>.<key>`."""
    return {
        f"optim.state.{name}.{key}": value
        for name, state in optimizer_state["state"].items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def expect(path, model, optimizer_state=None):
    """Writes `model.<name>` and `optim.state.<name>.<key>` to a safetensors file."""
    tensors = {f"model.{name}": tensor for name, tensor in model.items()}
    if optimizer_state is not None:
        tensors |= named_state(optimizer_state)
    save_file({name: whole(tensor).clone().contiguous() for name, tensor in tensors.items()}, path)


def by_name(model, optimizer):
    """The state of a plain optimizer, under names of parameters instead of numbers."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {"state": {names[id(parameter)]: state for parameter, state in optimizer.state.items()}}
