"""The peer of `fsdp bench train --device xla`: PyTorch/XLA on CPU, same model, same batch, same settings.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 bench/torch_xla_peer.py --ranks 2 [--micro-batch 2] [--steps 12] ...

A rank is a device. Several are devices of this process, which the compiler partitions a step over (FSDPv2, a unit for each
layer). A step is one program. Prints one JSON object, as bench/fsdp2_peer.py does; its warm-up compiles.
"""

import functools
import json
import resource
import statistics
import time

import numpy as np
import torch
import torch_xla
import torch_xla.debug.metrics as metrics
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as runtime
from fsdp2_peer import Layer, Llama, arguments
from torch import nn
from torch.nn import functional as F
from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel


def shard(model, mesh):
    def output(tensor, mesh):
        spmd.mark_sharding(tensor, mesh, ("fsdp",) + (None,) * (tensor.dim() - 1))

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer})
    return SpmdFullyShardedDataParallel(model, mesh=mesh, auto_wrap_policy=policy, shard_output=output)


def step(model, optimizer, micro_batches, vocab):
    for ids in micro_batches:
        logits = model(ids[:, :-1]).float()
        loss = F.cross_entropy(logits.reshape(-1, vocab), ids[:, 1:].reshape(-1)) / len(micro_batches)
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    return loss.item()


def main():
    args = arguments(ranks=1)
    if args.param_dtype != "f32":
        raise SystemExit("this peer computes in f32")
    if args.ranks > 1:
        runtime.use_spmd()
    device = torch_xla.device()
    torch.manual_seed(0)
    model = Llama(args)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model, rotary = model.to(device), model.rotary
    rotary.cos, rotary.sin = rotary.cos.to(device), rotary.sin.to(device)
    mesh = None
    if args.ranks > 1:
        mesh = spmd.Mesh(np.arange(args.ranks), (args.ranks, 1), ("fsdp", "model"))
        model = shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    per_pass = args.micro_batch * args.ranks or args.global_batch
    tokens = torch.randint(0, args.vocab, (args.global_batch, args.seq + 1))
    micro_batches = [ids.to(device) for ids in tokens.split(per_pass)]
    if mesh is not None:
        for ids in micro_batches:
            spmd.mark_sharding(ids, mesh, ("fsdp", None))
    seconds = []
    for _ in range(args.steps):
        start = time.perf_counter()
        loss = step(model, optimizer, micro_batches, args.vocab)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[args.warmup :])
    compiled = metrics.metric_data("CompileTime")
    result = {
        "parameters": parameters,
        "ranks": args.ranks,
        "micro_batch": per_pass // args.ranks,
        "step_ms_median": median * 1e3,
        "step_ms": [second * 1e3 for second in seconds],
        "programs": compiled[0] if compiled else 0,
        "tokens_per_s": args.global_batch * args.seq / median,
        "loss_last": loss,
        "resident_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "torch_xla": torch_xla.__version__,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
