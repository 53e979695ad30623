"""The peer of `fsdp-gpu-bench`: PyTorch FSDP2 on one device, same models, batches and optimizer.

    torchrun --standalone --nproc_per_node=1 bench/gpu/fsdp2_peer.py --model gpt2-124m [--compile] [--steps 30]

bf16 parameters and compute, f32 master weights and reduction, fused AdamW, gradients clipped at 1.0, no
activation checkpointing, one micro-batch a step. With `--compile` every layer and the loss are compiled, as FSDP2's
users do. `--device cpu --model llama-tiny` tries the script without a GPU. Rank 0 prints one JSON object.
"""

import argparse
import json
import math
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

MODELS = {
    "gpt2-124m": {"kind": "gpt2", "vocab": 50304, "width": 768, "layers": 12, "heads": 12, "seq": 1024, "batch": 64},
    "llama-1.2b": {
        "kind": "llama", "vocab": 128256, "width": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192,
        "seq": 2048, "batch": 8,
    },
    "llama-tiny": {
        "kind": "llama", "vocab": 512, "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128, "seq": 64,
        "batch": 4,
    },
}


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="gpt2-124m")
    parser.add_argument("--batch", type=int, help="sequences per step [default: the model's]")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    return parser.parse_args()


class Gpt2Layer(nn.Module):
    def __init__(self, width, heads, **_):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, _rotary):
        batch, positions, width = x.shape
        heads = lambda y: y.view(batch, positions, self.heads, width // self.heads).transpose(1, 2)
        q, k, v = (heads(part) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, positions, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class LlamaLayer(nn.Module):
    def __init__(self, width, heads, kv_heads, ffn, **_):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        kv_width = kv_heads * self.head_dim
        linear = lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False)
        self.queries, self.out = linear(width, width), linear(width, width)
        self.keys, self.values = linear(width, kv_width), linear(width, kv_width)
        self.gate, self.up, self.down = linear(width, ffn), linear(width, ffn), linear(ffn, width)

    def forward(self, x, rotary):
        batch, positions, width = x.shape
        cos, sin = (table.to(x.dtype) for table in rotary)
        split = lambda y, heads: y.view(batch, positions, heads, self.head_dim).transpose(1, 2)

        def rotate(y):
            low, high = y.chunk(2, dim=-1)
            return y * cos + torch.cat((-high, low), dim=-1) * sin

        h = self.norm1(x)
        q, k = rotate(split(self.queries(h), self.heads)), rotate(split(self.keys(h), self.kv_heads))
        v = split(self.values(h), self.kv_heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, positions, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def initialize(module):
    """Weights as the other program draws them: the power that a product takes depends on its numbers."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Model(nn.Module):
    def __init__(self, kind, vocab, width, layers, heads, seq, batch, **sizes):
        super().__init__()
        is_gpt2 = kind == "gpt2"
        layer = Gpt2Layer if is_gpt2 else LlamaLayer
        self.embedding = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(seq, width) if is_gpt2 else None
        self.layers = nn.ModuleList(layer(width=width, heads=heads, **sizes) for _ in range(layers))
        self.norm = nn.LayerNorm(width) if is_gpt2 else nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight
        frequencies = 10000.0 ** (-torch.arange(0, width // heads, 2) / (width // heads))
        angles = torch.outer(torch.arange(seq), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(initialize)
        if is_gpt2:
            # Weights that add to the residual stream start smaller in models with more layers.
            for block in self.layers:
                for linear in (block.out, block.down):
                    nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, ids):
        x = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, (self.cos, self.sin))
        return self.head(self.norm(x))


def loss_of(logits, targets):
    return F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1))


def prepare(args, sizes):
    torch.manual_seed(0)
    with torch.device(args.device):
        model = Model(**sizes)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))
    for layer in model.layers:
        if args.compile:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    options = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    return model, parameters, torch.optim.AdamW(model.parameters(), **options)


def device_used_bytes():
    """What the driver says is in use on the card, by everybody."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def main():
    args = arguments()
    on_gpu = args.device == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.cuda.set_device(dist.get_rank())
        torch.set_float32_matmul_precision("high")
    sizes = MODELS[args.model] | ({"batch": args.batch} if args.batch else {})
    model, parameters, optimizer = prepare(args, sizes)
    loss_function = torch.compile(loss_of) if args.compile else loss_of
    tokens = torch.randint(0, sizes["vocab"], (sizes["batch"], sizes["seq"] + 1), device=args.device)
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    losses = []
    for step in range(args.steps):
        # The host does not wait for the device within the timed steps.
        if step == args.warmup:
            synchronize()
            start = time.perf_counter()
        loss = loss_function(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    synchronize()
    mean = (time.perf_counter() - start) / (args.steps - args.warmup)
    if dist.get_rank() == 0:
        step_tokens = sizes["batch"] * sizes["seq"]
        flops = 6 * parameters + 12 * sizes["layers"] * sizes["width"] * sizes["seq"]
        result = {
            "model": args.model,
            "compiled": args.compile,
            "torch": torch.__version__,
            "parameters": parameters,
            "tokens_per_step": step_tokens,
            "step_ms_mean": mean * 1e3,
            "tokens_per_s": step_tokens / mean,
            "tflops": flops * step_tokens / mean / 1e12,
            "loss_first": losses[0].item(),
            "loss_last": losses[-1].item(),
        }
        if on_gpu:
            result["device"] = torch.cuda.get_device_name()
            result["peak_bytes"] = torch.cuda.max_memory_reserved()
            result["device_used_bytes"] = device_used_bytes()
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
