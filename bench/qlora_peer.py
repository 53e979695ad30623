"""The peer of `fsdp bench train --lora-rank 8 --param-dtype bf16 --quantize nf4`: PEFT on a Llama of transformers, in one process.

    python bench/qlora_peer.py [--hidden 256 ..] [--quantize none]     # also transformers, peft, bitsandbytes

Adapters are on all linear maps of layers. Prints one JSON object: the median step after the warm-up, and tokens/s.
"""

import argparse
import json
import statistics
import time

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def arguments():
    parser = argparse.ArgumentParser()
    sizes = {"hidden": 256, "layers": 4, "heads": 8, "kv-heads": 2, "ffn": 1024, "vocab": 4096, "seq": 256}
    for name, default in (sizes | {"global-batch": 8, "steps": 8, "warmup": 3, "lora-rank": 8, "threads": 2}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--quantize", choices=["nf4", "none"], default="nf4")
    return parser.parse_args()


def quantize(model):
    """Replaces the linear maps of layers by bitsandbytes' in NF4, with double quantization and products in bf16."""
    for name, module in list(model.model.layers.named_modules()):
        if isinstance(module, nn.Linear):
            parent, child = name.rsplit(".", 1)
            packed = bnb.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            packed.weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4")
            setattr(model.model.layers.get_submodule(parent), child, packed.to("cpu"))


def main():
    args = arguments()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.ffn,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    if args.quantize == "nf4":
        quantize(model)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=args.lora_rank, lora_alpha=16, target_modules=targets))
    model.train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    times = []
    for _ in range(args.warmup + args.steps):
        ids = torch.randint(args.vocab, (args.global_batch, args.seq))
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    step = statistics.median(times[args.warmup :])
    print(json.dumps({"step_s": step, "tokens_per_s": args.global_batch * args.seq / step}))


main()
