"""A gpt-oss whose experts are in MXFP4, as it is published, and what transformers makes of them.

usage: python mxfp4.py      (torch 2.11, transformers 5.17)

`mxfp4/` has `config.json` and `model.safetensors`; `mxfp4/expected.safetensors` has the stacks of experts in single precision.
"""

import json
import os

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../crates/fsdp-ckpt/tests/fixtures/mxfp4")
EXPERTS, HIDDEN, INNER = 3, 32, 64


def packed(generator, outputs, inputs):
    """Random codes, and exponents around that of one; the first block has the smallest and the largest."""
    blocks = torch.randint(0, 256, (EXPERTS, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(121, 127, (EXPERTS, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


torch.manual_seed(5)
generator = torch.Generator().manual_seed(5)
config = AutoConfig.for_model(
    "gpt_oss", vocab_size=31, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, num_local_experts=EXPERTS, num_experts_per_tok=2, max_position_embeddings=64,
    sliding_window=4, pad_token_id=None, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(FOLDER)
os.remove(f"{FOLDER}/generation_config.json")
tensors, expected = load_file(f"{FOLDER}/model.safetensors"), {}
for name, sizes in [("gate_up_proj", (2 * INNER, HIDDEN)), ("down_proj", (HIDDEN, INNER))]:
    stack = f"model.layers.0.mlp.experts.{name}"
    blocks, scales = packed(generator, *sizes)
    assert tensors.pop(stack).shape == (EXPERTS, *reversed(sizes))
    tensors |= {f"{stack}_blocks": blocks, f"{stack}_scales": scales}
    expected[stack] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
save_file(tensors, f"{FOLDER}/model.safetensors", metadata={"format": "pt"})
save_file(expected, f"{FOLDER}/expected.safetensors", metadata={"format": "pt"})
with open(f"{FOLDER}/config.json") as file:
    keys = json.load(file)
keys["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
with open(f"{FOLDER}/config.json", "w") as file:
    json.dump(keys, file, indent=2)
    file.write("\n")
