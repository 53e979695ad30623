"""Write the golden files of families of models (`families/`) from PyTorch and transformers.

usage: python families.py [CASE ...] [--out FOLDER]      (torch 2.11.0, transformers 5.17.0, safetensors)

A folder per case, as README.md describes it, with smaller models and fewer tensors: three steps of SGD, no other
optimizer, no float64. `ropes.json` has the frequencies of rotary positions for many configurations, as transformers'
functions compute them. One thread, CPU, no network; the same machine writes the same bytes twice.
"""

import argparse
import copy
import json
import os
import zlib

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

VOCAB, BATCH, SEQ, STEPS, LR = 31, 4, 12, 3, 0.1

_SMALL = dict(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16, rms_norm_eps=1e-5, initializer_range=0.2,
    bos_token_id=1, eos_token_id=2, pad_token_id=None, use_cache=False, tie_word_embeddings=False,
)  # fmt: skip


def rope(kind, theta=10000.0, **more):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=theta, **more))


def padded(token, **more):
    small = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    return small | dict(pad_token_id=token) | more


def latent(**more):
    """Sizes of latent attention, and of the mixtures beside it."""
    return dict(
        num_key_value_heads=4, q_lora_rank=6, kv_lora_rank=5, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8,
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=12, n_shared_experts=1, first_k_dense_replace=1,
    ) | more  # fmt: skip


def linear(**more):
    """A layer of linear attention, and one of softmax attention. The epsilon is large, because a norm of what heads read from almost
    empty states would enlarge its roundings."""
    return dict(
        layer_types=["linear_attention", "full_attention"], head_dim=8, linear_key_head_dim=6, linear_value_head_dim=5,
        linear_num_key_heads=2, linear_num_value_heads=4, rms_norm_eps=0.1,
    ) | rope("default", 100.0, partial_rotary_factor=0.5) | more  # fmt: skip


EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=12)

# case -> (model_type, what differs from _SMALL)
CASES = {
    # Frequencies of a Llama: divided; stretched because 12 tokens are more than 8; by zones of wavelength, all three
    # of which occur; by YaRN's ramp, with cosines and sines that have a factor.
    "llama-linear": ("llama", rope("linear", factor=4.0) | dict(num_hidden_layers=1)),
    "llama-dynamic": ("llama", rope("dynamic", factor=2.0) | dict(max_position_embeddings=8, num_hidden_layers=1)),
    "llama-llama3": (
        "llama",
        rope("llama3", 100.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
        | dict(head_dim=8, max_position_embeddings=256, num_hidden_layers=1),
    ),
    "llama-yarn": (
        "llama",
        rope("yarn", 100.0, factor=4.0, original_max_position_embeddings=32, beta_fast=2.0, beta_slow=0.5)
        | dict(head_dim=8, max_position_embeddings=128, num_hidden_layers=1),
    ),
    # A query sees itself and 4 keys before it.
    "mistral": ("mistral", dict(sliding_window=5)),
    # Queries, keys and values have biases; the second layer has a window.
    "qwen2": ("qwen2", dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    # Norms of heads; more elements in all heads than in a hidden state.
    "qwen3": ("qwen3", dict(head_dim=6, tie_word_embeddings=True)),
    # Packed projections; half of a head rotates; more tokens than the original 8, so the long factors act; a window.
    "phi3": (
        "phi3",
        rope("longrope", partial_rotary_factor=0.5, short_factor=[1.0, 1.1], long_factor=[1.5, 4.0],
             original_max_position_embeddings=8)
        | dict(num_attention_heads=2, num_key_value_heads=1, original_max_position_embeddings=8, sliding_window=7),
    ),
    # Norms of what is added, and of all queries and all keys of a token.
    "olmo2": ("olmo2", dict()),
    # The second layer has no rotary positions.
    "smollm3": ("smollm3", dict(no_rope_layers=[1, 0], tie_word_embeddings=True)),
    # Layer norms, biases, no gate, a window.
    "starcoder2": ("starcoder2", dict(sliding_window=5, tie_word_embeddings=True)),
    # Attention and MLP side by side, projections packed head by head, half of a head rotates; then one after the other.
    "gpt_neox": ("gpt_neox", dict(rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5))),
    "gpt_neox-sequential": ("gpt_neox", dict(use_parallel_residual=False, attention_bias=False, num_attention_heads=2)),
    # Scales of scores and embeddings, caps that act, a window in the first layer; norms of queries and keys instead of
    # caps, and rotary positions by type of layer.
    "gemma2": (
        "gemma2",
        dict(head_dim=6, query_pre_attn_scalar=10, attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
             sliding_window=5, tie_word_embeddings=True),
    ),
    "gemma3_text": (
        "gemma3_text",
        dict(head_dim=6, query_pre_attn_scalar=5, sliding_window=4, tie_word_embeddings=True,
             layer_types=["sliding_attention", "full_attention"],
             rope_parameters=dict(full_attention=dict(rope_type="linear", rope_theta=1000.0, factor=4.0),
                                  sliding_attention=dict(rope_type="default", rope_theta=100.0))),
    ),
    # Mixtures of experts: in all layers, weights that sum to one; in one layer, weights that do not.
    "mixtral": ("mixtral", dict(num_local_experts=5, num_experts_per_tok=2)),
    "qwen3_moe": (
        "qwen3_moe",
        dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=8, head_dim=6, mlp_only_layers=[0],
             norm_topk_prob=False),
    ),
    # The same with the balancing loss of routers, over two mixtures and over one.
    "mixtral-balanced": (
        "mixtral",
        dict(num_local_experts=5, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.5),
    ),
    "qwen3_moe-balanced": (
        "qwen3_moe",
        dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=8, head_dim=6, mlp_only_layers=[0],
             norm_topk_prob=True, output_router_logits=True, router_aux_loss_coef=0.5),
    ),
    # A token for padding that occurs in the text: inputs give its row of the embedding no gradient, a tied head does.
    # A negative one counts from the end; GPT-NeoX and GPT-2 have no such row.
    "gemma2-padding": ("gemma2", padded(0, head_dim=6, tie_word_embeddings=True)),
    "gemma3_text-padding": ("gemma3_text", padded(0, head_dim=6, tie_word_embeddings=True)),
    "gpt2-padding": ("gpt2", padded(5, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)),
    "gpt_neox-padding": ("gpt_neox", padded(5) | rope("default", partial_rotary_factor=0.5)),
    "llama-padding": ("llama", padded(2, tie_word_embeddings=True)),
    "mistral-padding": ("mistral", padded(-3)),
    "mixtral-padding": ("mixtral", padded(2, num_local_experts=3, num_experts_per_tok=2)),
    "olmo2-padding": ("olmo2", padded(1)),
    "phi3-padding": ("phi3", padded(30)),
    "qwen2-padding": ("qwen2", padded(7, tie_word_embeddings=True)),
    "qwen3-padding": ("qwen3", padded(7, head_dim=6)),
    "qwen3_moe-padding": (
        "qwen3_moe", padded(7, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8, head_dim=6)
    ),
    "smollm3-padding": ("smollm3", padded(4, tie_word_embeddings=True)),
    "starcoder2-padding": ("starcoder2", padded(0, tie_word_embeddings=True)),
    # Latent attention with YaRN's factor on scores; a layer with an MLP, and a mixture whose router has logistic scores, corrections and
    # groups, beside shared experts. The same without a narrow query, without groups, and with values wider than queries.
    "deepseek_v3": ("deepseek_v3", latent(n_group=4, topk_group=2, num_experts_per_tok=3, routed_scaling_factor=2.5, n_shared_experts=2)
                    | rope("yarn", 100.0, factor=4.0, original_max_position_embeddings=4, mscale=1.0, mscale_all_dim=1.0)),
    "deepseek_v3-direct": (
        "deepseek_v3",
        latent(q_lora_rank=None, rope_interleave=False, attention_bias=True, v_head_dim=12, n_group=1, topk_group=1,
               first_k_dense_replace=0, norm_topk_prob=False),
    ),
    "glm4_moe_lite": ("glm4_moe_lite", latent(mlp_layer_types=["sparse", "dense"], v_head_dim=10)),
    # The same mixtures behind other attention.
    "glm4_moe": (
        "glm4_moe",
        dict(n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=8, head_dim=8, use_qk_norm=True, attention_bias=True,
             n_group=2, topk_group=1, rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5)),
    ),
    # A Mixtral with corrected logistic scores, and norms of all queries and keys of a token.
    "minimax_m2": (
        "minimax_m2",
        dict(num_local_experts=5, num_experts_per_tok=2, head_dim=8,
             rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5)),
    ),
    # Probabilities of all experts, which do not sum to one, and a balancing loss.
    "olmoe": (
        "olmoe",
        dict(num_experts=5, num_experts_per_tok=2, attention_bias=True, output_router_logits=True, router_aux_loss_coef=0.5),
    ),
    # A shared expert with a weight, beside experts; a window in the first layer.
    "qwen2_moe": (
        "qwen2_moe",
        dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=12,
             use_sliding_window=True, sliding_window=4, mlp_only_layers=[1]),
    ),
    # Probabilities that are corrected for the choice, beside two shared experts; neighbors rotate together.
    "ernie4_5_moe": (
        "ernie4_5_moe",
        dict(moe_num_experts=5, moe_k=2, moe_intermediate_size=8, moe_num_shared_experts=2, moe_layer_start_index=1),
    ),
    "ernie4_5_moe-padding": (
        "ernie4_5_moe",
        padded(7, moe_num_experts=3, moe_k=2, moe_intermediate_size=8, moe_layer_start_index=0, moe_num_shared_experts=0),
    ),
    # Sinks, a window in the first layer, experts with biases and a clamped gate; rotary positions by YaRN without rounding of its ramp.
    "gpt_oss": (
        "gpt_oss",
        dict(num_local_experts=5, num_experts_per_tok=2, head_dim=8, sliding_window=4)
        | rope("yarn", 100.0, factor=4.0, original_max_position_embeddings=4, beta_fast=32.0, beta_slow=1.0, truncate=False),
    ),
    "gpt_oss-padding": ("gpt_oss", padded(7, num_local_experts=3, num_experts_per_tok=2, head_dim=6, attention_bias=False)),
    "deepseek_v3-padding": ("deepseek_v3", latent(**padded(7, num_key_value_heads=2), first_k_dense_replace=0, n_group=1, topk_group=1)),
    "glm4_moe_lite-padding": ("glm4_moe_lite", latent(**padded(7, num_key_value_heads=2), mlp_layer_types=["sparse"])),
    "glm4_moe-padding": (
        "glm4_moe", padded(7, n_routed_experts=3, num_experts_per_tok=2, moe_intermediate_size=8, first_k_dense_replace=0, head_dim=8)
    ),
    "minimax_m2-padding": ("minimax_m2", padded(7, num_local_experts=3, num_experts_per_tok=2, head_dim=6)),
    "olmoe-padding": ("olmoe", padded(1, num_experts=3, num_experts_per_tok=2)),
    "qwen2_moe-padding": (
        "qwen2_moe",
        padded(7, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8),
    ),
    # As OLMo 2; the first layer has a window and other rotary positions, which are not scaled.
    "olmo3": (
        "olmo3",
        dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"], attention_bias=True,
             rope_parameters=dict(
                 full_attention=dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=8),
                 sliding_attention=dict(rope_type="default", rope_theta=300.0))),
    ),
    "olmo3-padding": ("olmo3", padded(1, layer_types=["full_attention"])),
    # Biases everywhere but behind attention, and more elements in all heads than in a hidden state.
    "seed_oss": ("seed_oss", dict(head_dim=6, mlp_bias=True, attention_dropout=0.0, residual_dropout=0.0)),
    "seed_oss-padding": (
        "seed_oss", padded(1, head_dim=4, attention_out_bias=True, attention_dropout=0.0, residual_dropout=0.0)
    ),
    # Scales of embeddings, scores, what layers add, and logits.
    "granite": (
        "granite",
        dict(embedding_multiplier=3.0, attention_multiplier=0.4, residual_multiplier=0.3, logits_scaling=2.5,
             attention_bias=True, mlp_bias=True),
    ),
    "granite-padding": ("granite", padded(4, tie_word_embeddings=True, logits_scaling=0.5)),
    # Norms of what is added, and of queries and keys; the second layer sees all keys, and has no rotary positions
    # because the first has a window. Without a window all layers have them.
    "exaone4": (
        "exaone4",
        dict(head_dim=6, sliding_window=4, layer_types=["sliding_attention", "full_attention"]) | rope("default", 100.0),
    ),
    "exaone4-padding": ("exaone4", padded(3, sliding_window=None, layer_types=["full_attention"], tie_word_embeddings=True)),
    # Neighboring elements rotate together; biases everywhere.
    "ernie4_5": ("ernie4_5", dict(head_dim=6, use_bias=True, tie_word_embeddings=True) | rope("default", 100.0)),
    "ernie4_5-padding": ("ernie4_5", padded(0, head_dim=4)),
    # Norms of queries and keys after rotation; the base of the frequencies is grown, up to the longest text that the
    # model was made for. The second one goes beyond that.
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense", dict(head_dim=6, attention_bias=True) | rope("dynamic", 100.0, alpha=5.0, factor=1.0)
    ),
    "hunyuan_v1_dense-long": (
        "hunyuan_v1_dense",
        dict(head_dim=6, max_position_embeddings=8, num_hidden_layers=1) | rope("dynamic", 100.0, alpha=5.0, factor=2.0),
    ),
    "hunyuan_v1_dense-padding": ("hunyuan_v1_dense", padded(0, head_dim=4, tie_word_embeddings=True)),
    # Attention and MLP side by side behind one layer norm without a bias; neighboring elements rotate together, only
    # in the first layer, which has a window; a scale of logits. A key bias has no gradient in a layer without rotation,
    # so that only the second model has biases.
    "cohere2": (
        "cohere2",
        dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"], logit_scale=0.4, layer_norm_eps=1e-3,
             tie_word_embeddings=True) | rope("default", 100.0),
    ),
    "cohere2-padding": ("cohere2", padded(0, sliding_window=3, attention_bias=True)),
    # Norms before and after both halves, a packed gate; neighboring elements of the first half of a head rotate together.
    "glm4": ("glm4", dict(head_dim=8) | rope("default", 100.0, partial_rotary_factor=0.5)),
    "glm4-padding": ("glm4", padded(6, head_dim=4, attention_bias=False, tie_word_embeddings=True)),
    # As `granite`, with mixtures whose experts are stacked in files, under other names than in memory.
    "granitemoe": (
        "granitemoe",
        dict(num_local_experts=5, num_experts_per_tok=2, embedding_multiplier=3.0, attention_multiplier=0.4, residual_multiplier=0.3,
             logits_scaling=2.5, attention_bias=True),
    ),
    "granitemoe-padding": ("granitemoe", padded(4, num_local_experts=3, num_experts_per_tok=2, tie_word_embeddings=True)),
    # Linear attention by the gated delta rule, then softmax attention with a gate, of which half of a head rotates.
    "qwen3_5_text": ("qwen3_5_text", linear()),
    "qwen3_5_text-padding": ("qwen3_5_text", linear(**padded(7, head_dim=8, tie_word_embeddings=True, layer_types=["linear_attention"]))),
    # The same beside experts and a shared one with a weight; and with projections that are packed by key head, and an MLP.
    "qwen3_5_moe_text": ("qwen3_5_moe_text", linear(**EXPERTS)),
    "qwen3_5_moe_text-padding": ("qwen3_5_moe_text", linear(**padded(7, head_dim=8, layer_types=["full_attention"]), **EXPERTS)),
    "qwen3_next": ("qwen3_next", linear(norm_topk_prob=True, mlp_only_layers=[1], linear_conv_kernel_dim=3, **EXPERTS)),
    "qwen3_next-padding": (
        "qwen3_next", linear(**padded(7, head_dim=8, layer_types=["linear_attention"]), norm_topk_prob=False, **EXPERTS)
    ),
}  # fmt: skip


def write_model(folder, case, seed):
    """Write config.json and model.safetensors of a case, with every parameter drawn from its seed."""
    model_type, arguments = CASES[case]
    config = AutoConfig.for_model(model_type, **(_SMALL | arguments))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        # The weights of gpt-oss's experts are larger, so that its clamps act.
        scale = 1.5 if model_type == "gpt_oss" and name.endswith("experts.gate_up_proj") else 0.2
        noise = scale * torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(noise + 1.0 if parameter.ndim == 1 and name.endswith(".weight") else noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    model.generation_config.pad_token_id = None  # It may not be negative there.
    model.save_pretrained(folder)
    if os.path.exists(f"{folder}/generation_config.json"):
        os.remove(f"{folder}/generation_config.json")
    ids = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    if config.pad_token_id is not None:
        ids[:, 1::5] = config.pad_token_id % VOCAB
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    loaded.set_attn_implementation("eager")
    return loaded, ids


# What experts are called in files: gate, up and down.
_MIXTRAL, _QWEN = ["w1", "w3", "w2"], ["gate_proj", "up_proj", "down_proj"]
_EXPERTS = {"mixtral": _MIXTRAL, "minimax_m2": _MIXTRAL}


def named(model, value_of=lambda parameter: parameter):
    """Values of the parameters of a model (its gradients, say), under their names in files: for some families these are others than
    in memory, where the weights of experts are stacked."""
    kind = model.config.model_type
    sparse = (".mlp.", ".block_sparse_moe.")
    renamed = {
        "gpt_neox": ("lm_head.", "embed_out."), "mixtral": sparse, "minimax_m2": sparse, "granitemoe": (".router.", ".router.layer."),
    }.get(kind, ("", ""))  # fmt: skip
    values, stacks = {}, {}
    for name, parameter in model.named_parameters():
        # A constant, in some families a parameter that has no gradient.
        if name.endswith("e_score_correction_bias"):
            continue
        name, value = name.replace(*renamed, 1), value_of(parameter)
        if kind == "gpt_oss" and ".experts." in name:
            # Published as stacks; here, as everywhere, one by one.
            stacks[name.rsplit(".", 1)[1]] = value
            if len(stacks) == 4:
                stem = name.rsplit(".", 1)[0]
                each = range(len(value))
                values |= {f"{stem}.{expert}.{part}": stack[expert] for expert in each for part, stack in stacks.items()}
                stacks = {}
            continue
        if name.endswith(".experts.gate_up_proj"):
            both = value
            # Before transformers 5 the router was the first in all families.
            router = name.removesuffix("experts.gate_up_proj") + "gate.weight"
            if router not in values and kind != "granitemoe":
                values[router] = value_of(model.get_parameter(router))
        elif name.endswith(".experts.down_proj"):
            stem = name.removesuffix(".down_proj")
            for expert in range(len(value)):
                three = [*both[expert].chunk(2), value[expert]]
                values |= {f"{stem}.{expert}.{part}.weight": each for part, each in zip(_EXPERTS.get(kind, _QWEN), three)}
        else:
            values[name] = value
    return values


def loss_of(model, ids):
    """Logits, and the mean cross-entropy over all targets (the ids, shifted by one), with the balancing loss of routers if the
    configuration asks for it: what the model itself adds."""
    found = model(ids[:, :-1], use_cache=False)
    loss = F.cross_entropy(found.logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
    if getattr(model.config, "output_router_logits", False):
        loss = loss + model.router_aux_loss_coef * found.aux_loss
    return found.logits, loss


def expected(model, ids):
    """What a case is held to."""
    logits, loss = loss_of(model, ids)
    loss.backward()
    tensors = dict(ids=ids, logits=logits.detach(), loss=loss.detach())
    tensors |= {f"grad.{name}": gradient for name, gradient in named(model, lambda parameter: parameter.grad).items()}
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        _, loss = loss_of(model, ids)
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
    tensors |= {f"sgd.{name}": value for name, value in named(model, torch.Tensor.detach).items()}
    return tensors | dict(losses_sgd=torch.stack(losses))


def seed_of(case):
    """A case's seed does not depend on others, but for the first ones, whose seeds are their positions."""
    position = list(CASES).index(case)
    return 301 + position if position < 33 else zlib.crc32(case.encode())


def model_goldens(out, cases):
    for case in cases:
        seed = seed_of(case)
        folder = f"{out}/families/{case}"
        os.makedirs(folder, exist_ok=True)
        model, ids = write_model(folder, case, seed)
        tensors = {name: tensor.clone().contiguous() for name, tensor in expected(model, ids).items()}
        save_file(tensors, f"{folder}/expected.safetensors", metadata={"format": "pt"})
        with open(f"{folder}/parameters.txt", "w") as file:
            file.writelines(f"{name}\n" for name in named(model))
        print(case, tensors["losses_sgd"].tolist())


# Frequencies of rotary positions: configurations as they are published, and the corners of each kind.

_LLAMA = dict(model_type="llama", hidden_size=2048, num_attention_heads=32, head_dim=64, max_position_embeddings=131072)
_PHI3 = dict(model_type="phi3", hidden_size=96, num_attention_heads=2, max_position_embeddings=131072,
             original_max_position_embeddings=4096)  # fmt: skip
_YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768)
_LONG = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0 + 0.01 * i for i in range(24)],
    long_factor=[1.0 + 0.7 * i for i in range(24)],
)
ROPES = [  # (configuration, rope parameters, tokens of a sequence)
    (_LLAMA, dict(rope_type="default", rope_theta=500000.0), 4096),
    (_LLAMA, dict(rope_type="linear", rope_theta=10000.0, factor=2.5), 4096),
    (_LLAMA | dict(max_position_embeddings=2048), dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0), 2048),
    (_LLAMA | dict(max_position_embeddings=2048), dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0), 3000),
    (
        _LLAMA,
        dict(rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_max_position_embeddings=8192),
        4096,
    ),
    (_LLAMA, _YARN, 4096),
    (_LLAMA, _YARN | dict(truncate=False, beta_fast=16, beta_slow=2), 4096),
    (_LLAMA, _YARN | dict(attention_factor=1.75), 4096),
    (_LLAMA, _YARN | dict(mscale=0.707, mscale_all_dim=1.0), 4096),
    (_LLAMA, _YARN | dict(factor=None), 4096),
    (_PHI3, _LONG, 4096),
    (_PHI3, _LONG, 4097),
    (_PHI3, _LONG | dict(attention_factor=1.3), 8192),
    (_PHI3 | dict(partial_rotary_factor=0.5), _LONG | dict(short_factor=[1.5] * 12, long_factor=[2.5] * 12), 100),
]  # fmt: skip


def rope_goldens(out):
    cases = []
    for arguments, parameters, seq in ROPES:
        arguments = arguments | dict(rope_parameters=parameters)
        config = AutoConfig.for_model(**copy.deepcopy(arguments))
        kind = config.rope_parameters["rope_type"]
        base = AutoModelForCausalLM._model_mapping[type(config)]
        if kind == "default":
            module = __import__(base.__module__, fromlist=["x"])
            frequencies, factor = module.LlamaRotaryEmbedding.compute_default_rope_parameters(config)
        else:
            # The models pass a length on only where it is beyond the original one.
            length = torch.tensor(seq) if kind == "dynamic" else seq
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
        config_json = arguments | dict(
            vocab_size=8, intermediate_size=8, num_hidden_layers=1, num_key_value_heads=arguments["num_attention_heads"]
        )
        entry = dict(config=config_json, seq=seq, factor=float(factor), inverse_frequencies=frequencies.tolist())
        cases.append(entry)
    with open(f"{out}/ropes.json", "w") as file:
        lines = ",\n ".join(json.dumps(case) for case in cases)
        file.write(f"[{lines}]\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", help="only these")
    parser.add_argument("--out", default=os.path.dirname(os.path.abspath(__file__)))
    arguments = parser.parse_args()
    assert torch.__version__.split("+")[0] == "2.11.0", torch.__version__
    assert transformers.__version__ == "5.17.0", transformers.__version__
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model_goldens(arguments.out, arguments.cases or CASES)
    rope_goldens(arguments.out)
