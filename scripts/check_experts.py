"""Compares both forms of experts with transformers, for every family whose experts `fsdp ckpt convert` stacks.

    pip install torch==2.11.0 transformers==5.17.0
    cargo build --release -p fsdp-cli
    python scripts/check_experts.py target/release/fsdp

A small random model of each family is saved as transformers publishes it and as it holds it in memory; each is converted
to the other form, and must be equal to it in names and bits. Families that change more than their experts are refused.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
SHARED = {**QWEN, "num_shared_experts": 1}
GROUPS = {"n_group": 1, "topk_group": 1}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1, **GROUPS}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "afmoe": {**SHARED, "head_dim": 8, "num_dense_layers": 1},
    "cohere2_moe": {**SHARED, "head_dim": 8},
    "deepseek_v2": {**ROUTED, **LATENT, "first_k_dense_replace": 1},
    "deepseek_v3": {**ROUTED, **LATENT, "first_k_dense_replace": 1},
    "dots1": {**ROUTED, "head_dim": 8, "first_k_dense_replace": 1},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**ROUTED, "head_dim": 8, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**ROUTED, **LATENT},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "longcat_flash": {
        **LATENT,
        "n_routed_experts": 4,
        "zero_expert_num": 0,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 8,
        "ffn_hidden_size": 24,
        "num_layers": 2,
    },
    "mellum": {**QWEN, "head_dim": 8},
    "minimax": {**MIXTRAL, "head_dim": 8},
    "minimax_m2": {**MIXTRAL, "head_dim": 8, "rotary_dim": 8},
    "mixtral": MIXTRAL,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**QWEN, "shared_expert_intermediate_size": 8},
    "qwen3_moe": {**QWEN, "head_dim": 8},
    "qwen3_next": {**QWEN, **LINEAR, "shared_expert_intermediate_size": 8, "head_dim": 8},
    "solar_open": {**ROUTED, "head_dim": 8},
}
REFUSED = {
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "moe_num_shared_experts": 1},
    "exaone_moe": {**SHARED, **GROUPS},
    "phimoe": MIXTRAL,
}


def write(family, sizes, published, memory):
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **sizes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(published)
    config.save_pretrained(memory)
    names = load_file(published / "model.safetensors").keys()
    # A tied head is published once.
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    state = {name: value.clone() for name, value in state.items() if name in names or name != "lm_head.weight"}
    save_file(state, memory / "model.safetensors")


def difference(ours, theirs):
    ours, theirs = load_file(ours), load_file(theirs / "model.safetensors")
    if ours.keys() != theirs.keys():
        return f"names differ: {sorted(ours.keys() ^ theirs.keys())[:4]}"
    return next((f"{name} differs" for name in ours if not torch.equal(ours[name], theirs[name])), None)


def main():
    fsdp, faults = sys.argv[1], []
    for family, sizes in (FAMILIES | REFUSED).items():
        with tempfile.TemporaryDirectory() as folder:
            published, memory = pathlib.Path(folder, "published"), pathlib.Path(folder, "memory")
            write(family, sizes, published, memory)
            for form, source, expected in [("separate", memory, published), ("fused", published, memory)]:
                out = pathlib.Path(folder, f"{form}.safetensors")
                command = [fsdp, "ckpt", "convert", source, out, "--to", "safetensors", "--experts", form, "--no-sync"]
                ran = subprocess.run(command, capture_output=True, text=True)
                if family in REFUSED:
                    found = None if ran.returncode == 2 and "not known to be stacked" in ran.stderr else "not refused"
                else:
                    found = difference(out, expected) if ran.returncode == 0 else ran.stderr.strip()
                print(f"{family:15} {form:9} {found or ('refused' if family in REFUSED else 'equal')}")
                faults += [found] if found else []
    sys.exit(f"{len(faults)} differ" if faults else 0)


if __name__ == "__main__":
    main()
