"""The peer of `fsdp bench train`: PyTorch FSDP2 over gloo on CPU, same model, same batch, same settings.

    torchrun --standalone --nproc_per_node=4 bench/fsdp2_peer.py [--micro-batch 2] [--steps 12] ...

Every rank runs `global batch / world / micro batch` forward and backward passes per step and reduces once, as
FSDP2 users accumulate. Rank 0 prints one JSON object: the median step after the warm-up, tokens/s, and the
peak resident memory summed over all ranks.
"""

import argparse
import json
import os
import resource
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F


def arguments(**more):
    parser = argparse.ArgumentParser()
    sizes = {"hidden": 256, "layers": 4, "heads": 8, "kv-heads": 2, "ffn": 1024, "vocab": 4096, "seq": 256}
    for name, default in (sizes | {"global-batch": 8, "steps": 12, "warmup": 3} | more).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences per pass; 0: one pass per step")
    parser.add_argument("--threads", type=int, default=0, help="threads over all ranks; 0: one per core")
    parser.add_argument("--param-dtype", choices=["f32", "bf16"], default="f32")
    return parser.parse_args()


class Rotary:
    """Rotary positions in the convention of Hugging Face."""

    def __init__(self, head_dim, positions):
        frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(positions), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def __call__(self, x):  # (batch, heads, positions, head_dim)
        low, high = x.chunk(2, dim=-1)
        rotated = torch.cat((-high, low), dim=-1)
        return x * self.cos.to(x.dtype) + rotated * self.sin.to(x.dtype)


class Layer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.heads, self.kv_heads = args.heads, args.kv_heads
        self.head_dim = args.hidden // args.heads
        kv_width = args.kv_heads * self.head_dim
        self.attention_norm = nn.RMSNorm(args.hidden, eps=1e-5)
        self.queries = nn.Linear(args.hidden, args.hidden, bias=False)
        self.keys = nn.Linear(args.hidden, kv_width, bias=False)
        self.values = nn.Linear(args.hidden, kv_width, bias=False)
        self.output = nn.Linear(args.hidden, args.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(args.hidden, eps=1e-5)
        self.gate = nn.Linear(args.hidden, args.ffn, bias=False)
        self.up = nn.Linear(args.hidden, args.ffn, bias=False)
        self.down = nn.Linear(args.ffn, args.hidden, bias=False)

    def attention(self, x, rotary):
        batch, positions, width = x.shape
        split = lambda y, heads: y.view(batch, positions, heads, self.head_dim).transpose(1, 2)
        queries = rotary(split(self.queries(x), self.heads))
        keys = rotary(split(self.keys(x), self.kv_heads))
        values = split(self.values(x), self.kv_heads)
        y = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return self.output(y.transpose(1, 2).reshape(batch, positions, width))

    def forward(self, x, rotary):
        x = x + self.attention(self.attention_norm(x), rotary)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embedding = nn.Embedding(args.vocab, args.hidden)
        self.layers = nn.ModuleList(Layer(args) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.hidden, eps=1e-5)
        self.head = nn.Linear(args.hidden, args.vocab, bias=False)
        self.rotary = Rotary(args.hidden // args.heads, args.seq)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, self.rotary)
        return self.head(self.norm(x))


def shard(model, args, world):
    options = {"mesh": init_device_mesh("cpu", (world,))}
    if args.param_dtype == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def step(model, optimizer, micro_batches, vocab):
    for index, ids in enumerate(micro_batches):
        model.set_requires_gradient_sync(index + 1 == len(micro_batches))
        logits = model(ids[:, :-1]).float()
        loss = F.cross_entropy(logits.reshape(-1, vocab), ids[:, 1:].reshape(-1)) / len(micro_batches)
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main():
    args = arguments()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    threads = max(1, (args.threads or os.cpu_count()) // world)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = Llama(args)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    shard(model, args, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    per_rank = args.global_batch // world
    micro_batches = torch.randint(0, args.vocab, (per_rank, args.seq + 1)).split(args.micro_batch or per_rank)
    seconds = []
    for _ in range(args.steps):
        start = time.perf_counter()
        step(model, optimizer, micro_batches, args.vocab)
        seconds.append(time.perf_counter() - start)
    resident = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024], dtype=torch.int64)
    dist.all_reduce(resident)
    if rank == 0:
        median = statistics.median(seconds[args.warmup :])
        tokens = args.global_batch * args.seq
        result = {
            "parameters": parameters,
            "ranks": world,
            "threads_per_rank": threads,
            "micro_batch": micro_batches[0].shape[0],
            "step_ms_median": median * 1e3,
            "step_ms": [second * 1e3 for second in seconds],
            "tokens_per_s": tokens / median,
            "gflops": 6 * parameters * tokens / median / 1e9,
            "resident_peak_bytes": resident.item(),
            "torch": torch.__version__,
        }
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
