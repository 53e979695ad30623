#!/usr/bin/env python3
"""Times linear attention beside transformers' implementation in PyTorch, alternating on the CPU.

    cargo bench -p fsdp-nn --features bench --bench delta --no-run     (prints the path of the program)
    bench/delta.py PROGRAM [--threads 2] [--rounds 5]                  (torch 2.11, transformers 5.17)

The gated delta rule over 8 heads with keys and values of 128 elements, and the short convolution of their 3,072 columns with 4 weights
each, in f32. Both compute the gates from their logits, and the norms of queries and keys. With one thread, times are those of the
processor, which other work on the machine hardly changes.
"""

import argparse
import statistics
import subprocess
import time

import torch
from torch.nn.functional import softplus
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

HEADS, DIM, KERNEL = 8, 128, 4
WIDTH = 3 * HEADS * DIM
CASES = [(1, 512), (4, 512), (1, 2048), (4, 2048)]
PARTS = ["delta rule, forward", "delta rule, forward and backward", "convolution, forward", "convolution, forward and backward"]


def leaf(*shape):
    return (torch.rand(*shape) * 2 - 1).requires_grad_()


def peer(clock, batch, seq):
    """The seconds of each part."""
    q, k, v = (leaf(batch, seq, HEADS, DIM) for _ in range(3))
    logits, a = (leaf(batch, seq, HEADS) for _ in range(2))
    a_log, dt_bias = leaf(HEADS), leaf(HEADS)

    def rule():
        g = -a_log.exp() * softplus(a + dt_bias)
        return torch_chunk_gated_delta_rule(q, k, v, g, logits.sigmoid(), use_qk_l2norm_in_kernel=True)[0]

    # transformers keeps columns before positions here.
    x, weight = leaf(batch, WIDTH, seq), leaf(WIDTH, KERNEL)

    def convolution():
        return causal_conv1d_fn(x, weight, None, activation="silu")

    return [*both(clock, rule), *both(clock, convolution)]


def both(clock, forward):
    """The seconds of forward without gradients, and of forward and backward."""
    dy = torch.rand_like(forward())
    start = clock()
    with torch.no_grad():
        forward()
    middle = clock()
    forward().backward(dy)
    return middle - start, clock() - middle


def ours(program, threads, batch, seq):
    """The same of this project's kernels."""
    args = [program, *map(str, [threads, batch, seq, 2])]
    lines = subprocess.run(args, capture_output=True, text=True, check=True).stdout.splitlines()
    # The first run allocates.
    rule, rule_backward, convolution, convolution_backward = map(float, lines[-1].split())
    return [rule, rule + rule_backward, convolution, convolution + convolution_backward]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    for batch, seq in CASES:
        pairs = [
            (ours(options.program, options.threads, batch, seq), peer(clock, batch, seq)) for _ in range(options.rounds)
        ]
        for part, name in enumerate(PARTS):
            mine, theirs = ([pair[side][part] for pair in pairs] for side in (0, 1))
            ratio = statistics.median(other / own for own, other in zip(mine, theirs))
            medians = [1e3 * statistics.median(times) for times in (mine, theirs)]
            print(f"{batch} x {seq}, {name}: {medians[0]:.1f} ms, peer {medians[1]:.1f} ms, ratio {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
