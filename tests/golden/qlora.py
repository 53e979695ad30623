"""Write the golden files of QLoRA from bitsandbytes and PEFT: `llama-nf4`, and its adapter in `llama-nf4/lora`.

usage: python qlora.py      (torch, transformers, peft and bitsandbytes as in README.md)

A Llama whose linear maps bitsandbytes has quantized (NF4, double quantization, products in f32), as transformers saves it; the
elements that one of them decodes to; an adapter as in lora.py, and what three steps make of it. One thread, CPU, no network.
"""

import os
import shutil

import bitsandbytes.functional as bnb
import torch
from cases import BATCH, SEQ, VOCAB
from lora import write_adapter
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "llama-nf4")
# Blocks of 256 scales end inside rows: rows have 2 or 3 blocks of elements, matrices up to 384.
CONFIG = LlamaConfig(
    vocab_size=VOCAB, hidden_size=128, intermediate_size=192, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16, rms_norm_eps=1e-5, initializer_range=0.1,
    bos_token_id=1, eos_token_id=2, use_cache=False, tie_word_embeddings=False,
)  # fmt: skip
QUANTIZATION = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)
ADAPTER = LoraConfig(
    task_type="CAUSAL_LM",
    lora_dropout=0.0,
    r=3,
    lora_alpha=5,
    target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"],
)


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(301)
    shutil.rmtree(FOLDER, ignore_errors=True)
    plain = os.path.join(FOLDER, "plain")
    LlamaForCausalLM(CONFIG).save_pretrained(plain)
    base = AutoModelForCausalLM.from_pretrained(
        plain,
        quantization_config=QUANTIZATION,
        dtype=torch.float32,
        device_map="cpu",
        attn_implementation="eager",
    )
    shutil.rmtree(plain)
    base.save_pretrained(FOLDER)
    down = base.model.layers[0].mlp.down_proj.weight
    expected = {
        "ids": torch.randint(0, VOCAB, (BATCH, SEQ + 1)),
        "model.layers.0.mlp.down_proj.weight": bnb.dequantize_4bit(down.data, down.quant_state),
    }
    save_file(expected, os.path.join(FOLDER, "expected.safetensors"))
    write_adapter("llama-nf4", "lora", base, ADAPTER, 302)
    for name in ["config.json", "model.safetensors", "expected.safetensors"]:
        os.chmod(os.path.join(FOLDER, name), 0o644)
    os.remove(os.path.join(FOLDER, "generation_config.json"))


if __name__ == "__main__":
    main()
