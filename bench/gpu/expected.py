#!/usr/bin/env python3
"""What a step of `fsdp-gpu-bench` should take on one GPU, by counting; nothing is measured.

    bench/gpu/expected.py [--matmul 680] [--copy 4300] [--attention 300] [--attention-backward 240] [--issue 22.2]

Every operation that a training step gives to the device is listed with its operations and the bytes that it must read
and write, as the models, the tape and the kernels of this repository do it (one rank, bf16 compute, f32 gradients and
master, AdamW, clipping, no checkpointing, no dropout). A product takes its operations at `--matmul` TFLOP/s, attention
at its own rates, everything else its bytes at `--copy` GB/s; a kernel of ours that has more instructions than that takes
them at `--issue`, which is for all lanes: 132 multiprocessors of 128 lanes at 1.755 GHz, three cycles of four. Defaults
are for an H200. The host takes HOST_US for each kind of call. What is left out: gaps between kernels, tails of waves,
waits at barriers, the clock of a hot card.
"""

import argparse
from collections import defaultdict

MODELS = {
    "gpt2-124m": {"vocab": 50304, "width": 768, "layers": 12, "heads": 12, "kv_heads": 12, "ffn": 3072, "seq": 1024, "batch": 64},
    "llama-1.2b": {"vocab": 128256, "width": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192, "seq": 2048, "batch": 8},
}
# Bytes per element.
HALF, FULL = 2, 4
# Instructions per element of those fsdp kernels that may be bound by them, counted in the code of NVRTC 13.0 for sm_90
# along the path of a thread. For norms they include all work on a row of one vector per thread, as here.
INSTRUCTIONS = {
    "gelu": 29.5,
    "gelu_backward": 42.5,
    "swiglu": 28,
    "swiglu_backward": 38.5,
    "layer_norm": 44,
    "layer_norm_backward": 51,
    "layer_norm_weight": 10,
    "rms_norm": 27,
    "rms_norm_backward": 42,
    "rms_norm_weight": 8.5,
    "rope": 18,
    "adamw": 52,
}
# Host time of one libtorch operation with its views, of one launch of an fsdp kernel, and of attention.
HOST_US = {"torch": 8.0, "ours": 2.5, "attention": 30.0}


def chunk_rows(rows, vocab):
    """As `HeadChunks::Large`."""
    most = max((1 << 29) // vocab, 256) // 256 * 256
    chunks = -(-rows // most)
    return min(rows, -(-(-(-rows // chunks)) // 256) * 256)


class Step:
    """Operations of a step: seconds on the device by category, and calls of the host."""

    def __init__(self, rates):
        self.rates = rates
        self.seconds = defaultdict(float)
        self.totals = defaultdict(float)
        self.calls = defaultdict(int)

    def product(self, m, n, k, times=1, category="products of layers"):
        flops = 2 * m * n * k * times
        self.seconds[category] += flops / (self.rates.matmul * 1e12)
        self.totals["flops"] += flops
        self.calls["torch"] += times

    def attention(self, flops, backward, times):
        rate = self.rates.attention_backward if backward else self.rates.attention
        self.seconds["attention"] += flops * times / (rate * 1e12)
        self.totals["flops"] += flops * times
        self.calls["attention"] += times

    def move(self, category, bytes_moved, times=1, by="ours", launches=1, kernel=None, elements=0):
        """Work that is bound by memory, or by the instructions of a kernel."""
        seconds = bytes_moved / (self.rates.copy * 1e9)
        if kernel:
            issued = INSTRUCTIONS[kernel] * elements / (self.rates.issue * 1e12)
            self.totals["more to issue"] += max(issued - seconds, 0) * times
            seconds = max(seconds, issued)
        self.seconds[category] += seconds * times
        self.totals["bytes"] += bytes_moved * times
        self.calls[by] += times * launches


def attention_block(step, s, rows, row):
    """The core of attention, and what lies around it; `row` is the bytes of a row of hidden states."""
    layers, head = s["layers"], s["width"] // s["heads"]
    packed = (s["heads"] + 2 * s["kv_heads"]) * head * HALF * rows
    causal = 2 * 2 * rows * s["seq"] / 2 * s["width"]
    step.attention(causal, False, layers)
    step.attention(2.5 * causal, True, layers)
    # The output is copied from libtorch's tensor; one kernel copies the gradients of q, k and v into packed rows.
    step.move("attention, copies", 2 * row, layers, by="torch", launches=0)
    step.move("attention, copies", 2 * packed, layers, by="torch", launches=0)


def layers_of_gpt2(step, s, rows):
    layers, d, f = s["layers"], s["width"], s["ffn"]
    row, wide = rows * d * HALF, rows * f * HALF
    for inputs, outputs in ((d, 3 * d), (d, d), (d, f), (f, d)):
        step.product(rows, outputs, inputs, 3 * layers)
        step.move("gradients of biases", rows * outputs * HALF, layers, launches=2)
    attention_block(step, s, rows, row)
    norms = 2 * layers + 1
    step.move("norms", 2 * row, norms, kernel="layer_norm", elements=rows * d)
    step.move("norms, again in backward", 2 * row, 2 * layers, kernel="layer_norm", elements=rows * d)
    # Gradients of weights, of biases and of the input, which is accumulated except for the last norm.
    step.move("norms, backward", 2 * row, norms, launches=2, kernel="layer_norm_weight", elements=rows * d)
    step.move("norms, backward", row, norms, launches=2)
    step.move("norms, backward", 4 * row, norms, kernel="layer_norm_backward", elements=rows * d)
    step.move("sums", 3 * row, 2 * layers)
    step.move("activation", 2 * wide, layers, kernel="gelu", elements=rows * f)
    # Reads the input and the gradient; writes the gradient of the input, and the output again.
    step.move("activation, backward", 4 * wide, layers, kernel="gelu_backward", elements=rows * f)


def layers_of_llama(step, s, rows):
    layers, d, f = s["layers"], s["width"], s["ffn"]
    head = d // s["heads"]
    row, wide, kv = rows * d * HALF, rows * f * HALF, s["kv_heads"] * head
    for inputs, outputs, count in ((d, d, 2), (d, kv, 2), (d, f, 2), (f, d, 1)):
        step.product(rows, outputs, inputs, 3 * layers * count)
    attention_block(step, s, rows, row)
    # Queries and keys, in place, in forward and backward.
    rotated = rows * (d + kv)
    step.move("rotations", 2 * rotated * HALF, 2 * layers, kernel="rope", elements=rotated)
    norms = 2 * layers + 1
    step.move("norms", 2 * row, norms, kernel="rms_norm", elements=rows * d)
    step.move("norms, again in backward", 2 * row, 2 * layers, kernel="rms_norm", elements=rows * d)
    step.move("norms, backward", 4 * row, norms, kernel="rms_norm_backward", elements=rows * d)
    step.move("norms, backward", 2 * row, norms, launches=2, kernel="rms_norm_weight", elements=rows * d)
    step.move("sums", 3 * row, 2 * layers)
    step.move("activation", 3 * wide, layers, kernel="swiglu", elements=rows * f)
    step.move("activation, backward", 6 * wide, layers, kernel="swiglu_backward", elements=rows * f)


def head(step, s, rows):
    vocab, d = s["vocab"], s["width"]
    chunk = chunk_rows(rows, vocab)
    chunks = -(-rows // chunk)
    step.product(rows, vocab, d, 3, category="head, products")
    step.calls["torch"] += 3 * (chunks - 1)
    # Reads the logits twice and writes their gradient in bf16.
    logits = rows * vocab
    step.move("head, cross-entropy", logits * (2 * FULL + HALF))
    # Every chunk except the first reads the gradient of the weight again.
    step.move("head, gradient of the weight", vocab * d * 2 * FULL, chunks - 1, launches=0)


def embedding(step, s, rows, tables):
    d = s["width"]
    step.move("embedding", rows * d * 2 * HALF, tables, by="torch")
    # Converted to f32, read, and added atomically in the cache.
    step.move("embedding", rows * d * (HALF + 2 * FULL), tables, by="torch", launches=2)


def update(step, parameters, tensors, launches):
    step.move("norm and update", parameters * FULL, 1, launches=tensors)
    # Reads the gradient, master weights and two moments; writes all but the gradient, and the bf16 copy.
    moved = parameters * (7 * FULL + HALF)
    step.move("norm and update", moved, 1, launches=launches, kernel="adamw", elements=parameters)


def expected(name, rates):
    s, step = MODELS[name], Step(rates)
    rows, d, f, layers, vocab = s["seq"] * s["batch"], s["width"], s["ffn"], s["layers"], s["vocab"]
    if name.startswith("gpt2"):
        layers_of_gpt2(step, s, rows)
        embedding(step, s, rows, 2)
        parameters = layers * (12 * d * d + 13 * d) + (vocab + s["seq"] + 2) * d
        update(step, parameters, 12 * layers + 4, 9 * layers + 2)
    else:
        layers_of_llama(step, s, rows)
        embedding(step, s, rows, 1)
        kv = s["kv_heads"] * (d // s["heads"])
        parameters = layers * (2 * d * d + 2 * d * kv + 3 * d * f + 2 * d) + vocab * d + d
        update(step, parameters, 9 * layers + 2, 3 * layers + 2)
    head(step, s, rows)
    return s, step, rows, parameters


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matmul", type=float, default=680, help="TFLOP/s of products in bf16")
    parser.add_argument("--copy", type=float, default=4300, help="GB/s read and written")
    parser.add_argument("--attention", type=float, default=300, help="TFLOP/s of causal attention, forward")
    parser.add_argument("--attention-backward", type=float, default=240, help="and backward")
    parser.add_argument("--issue", type=float, default=22.2, help="10^12 instructions per second, over all lanes")
    rates = parser.parse_args()
    for name in MODELS:
        s, step, rows, parameters = expected(name, rates)
        total = sum(step.seconds.values())
        model_flops = 6 * parameters + 12 * s["layers"] * s["width"] * s["seq"]
        host = sum(HOST_US[kind] * count for kind, count in step.calls.items()) / 1e3
        print(f"{name}: {parameters:,} parameters, {rows} tokens, {step.totals['flops'] / 1e12:.1f} TFLOP,"
              f" {step.totals['bytes'] / 1e9:.0f} GB outside products and attention")
        for category, seconds in sorted(step.seconds.items(), key=lambda item: -item[1]):
            print(f"  {category:<32} {seconds * 1e3:>8.2f} ms {100 * seconds / total:>6.1f} %")
        print(f"  {'more than bytes, to issue':<32} {step.totals['more to issue'] * 1e3:>8.2f} ms (part of the above)")
        print(f"  {'step':<32} {total * 1e3:>8.2f} ms, {rows / total:,.0f} tokens/s,"
              f" {model_flops * rows / total / 1e12:.0f} TFLOP/s by 6N + 12LdT")
        print(f"  {'issued by the host in':<32} {host:>8.2f} ms, {100 * host / total / 1e3:.0f} % of the step:"
              f" {step.calls['torch']} operations of libtorch, {step.calls['attention']} attentions,"
              f" {step.calls['ours']} kernels of ours\n")


if __name__ == "__main__":
    main()
