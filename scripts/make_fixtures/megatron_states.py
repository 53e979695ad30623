"""Checkpoints of Megatron Core: `torch_dist` with the states of its optimizers, and the older folders of ranks.

usage: python megatron_states.py      (megatron-core 0.16.1, torch 2.11.0, transformers 5.23.0)

Weights come from a model of transformers, and gradients are random, so `expected_*.safetensors` has what transformers and
`torch.optim.AdamW` hold after the same step under the names of Hugging Face. Each checkpoint is loaded again with Megatron's
own `load_plain_tensors`, into `plain_*.safetensors`.

Megatron Core trains on GPUs alone; `pretend_gpu` tells it that the CPU is one. What it writes does not depend on that. The
contents of `common.pt` are those of `generate_state_dict` in Megatron-LM, which is in no package.
"""

import argparse
import contextlib
import datetime
import os
import pathlib
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
from common import FIXTURES, run_ranks
from safetensors.torch import save_file

FOLDER = FIXTURES / "megatron"
VOCAB, PADDED = 37, 48
HIDDEN, HEADS, GROUPS, HEAD, FFN, EXPERTS = 8, 4, 2, 4, 12, 4
ROTARY_BASES = {"mixtral": 1000000}


def pretend_gpu():
    """Megatron's calls for GPUs, as calls for the CPU."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    nothing = {"__init__": lambda self, *_, **__: None, "__getattr__": lambda self, name: lambda *_: self}
    torch.cuda.Stream = type("Stream", (), nothing)
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: torch.cuda.Stream()
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *_, **__: self
    named = torch.Tensor.type
    torch.Tensor.type = lambda self, *to, **keys: named(self, *to, **keys) if to else named(self).replace("torch.", "torch.cuda.")
    for name in ["tensor", "zeros", "empty", "empty_like"]:
        make = getattr(torch, name)

        def on_cpu(*arguments, make=make, **keys):
            if str(keys.get("device", "")).startswith("cuda"):
                keys["device"] = "cpu"
            return make(*arguments, **keys)

        setattr(torch, name, on_cpu)


# The models of transformers


def model_of(family, layers):
    import transformers as hf

    shared = dict(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=GROUPS,
        head_dim=HEAD, intermediate_size=FFN, max_position_embeddings=32, initializer_range=0.3, bos_token_id=None,
        eos_token_id=None, pad_token_id=None, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(11)
    if family == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**shared, rms_norm_eps=1e-5))
    if family == "qwen2":
        return hf.Qwen2ForCausalLM(hf.Qwen2Config(**shared, tie_word_embeddings=True, rms_norm_eps=1e-5))
    moe = dict(num_experts_per_tok=2, rms_norm_eps=1e-5)
    if family == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**shared, **moe, num_local_experts=EXPERTS, tie_word_embeddings=False))
    assert family == "qwen3_moe"
    return hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**shared, **moe, num_experts=EXPERTS, moe_intermediate_size=FFN, norm_topk_prob=True)
    )


def published(folder):
    """The weights under the names of files, with experts one by one."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


# From their names to Megatron's, for whole tensors


def to_megatron(weights, pad=0.0):
    """The weights of all layers under the names that Megatron's modules would have without parallelism."""
    out = {}
    for name, tensor in weights.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = torch.full((PADDED - VOCAB, HIDDEN), pad)
            key = "output_layer.weight" if name == "lm_head.weight" else "embedding.word_embeddings.weight"
            out[key] = torch.cat([tensor, rows])
    out["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
    for layer in range(1 + max(int(name.split(".")[2]) for name in weights if ".layers." in name)):
        get = lambda name, layer=layer: weights[f"model.layers.{layer}.{name}"]
        to = f"decoder.layers.{layer}."
        for kind in ["weight", "bias"]:
            if f"model.layers.{layer}.self_attn.q_proj.{kind}" not in weights:
                continue
            q, k, v = (get(f"self_attn.{which}_proj.{kind}") for which in "qkv")
            parts = []
            for group in range(GROUPS):
                many = HEADS // GROUPS * HEAD
                parts += [q[group * many : (group + 1) * many], k[group * HEAD : (group + 1) * HEAD], v[group * HEAD : (group + 1) * HEAD]]
            out[f"{to}self_attention.linear_qkv.{kind}"] = torch.cat(parts)
        out[f"{to}self_attention.linear_proj.weight"] = get("self_attn.o_proj.weight")
        out[f"{to}input_layernorm.weight"] = get("input_layernorm.weight")
        out[f"{to}pre_mlp_layernorm.weight"] = get("post_attention_layernorm.weight")
        for which in "qk":
            if f"model.layers.{layer}.self_attn.{which}_norm.weight" in weights:
                out[f"{to}self_attention.{which}_layernorm.weight"] = get(f"self_attn.{which}_norm.weight")
        for moe, names in [("mlp", ("gate_proj", "up_proj", "down_proj")), ("block_sparse_moe", ("w1", "w3", "w2"))]:
            if f"model.layers.{layer}.{moe}.gate.weight" not in weights:
                continue
            out[f"{to}mlp.router.weight"] = get(f"{moe}.gate.weight")
            for expert in range(EXPERTS):
                gate, up, down = (get(f"{moe}.experts.{expert}.{name}.weight") for name in names)
                out[f"{to}mlp.experts.local_experts.{expert}.linear_fc1.weight"] = torch.cat([gate, up])
                out[f"{to}mlp.experts.local_experts.{expert}.linear_fc2.weight"] = down
        if f"model.layers.{layer}.mlp.gate_proj.weight" in weights:
            out[f"{to}mlp.linear_fc1.weight"] = torch.cat([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")])
            out[f"{to}mlp.linear_fc2.weight"] = get("mlp.down_proj.weight")
    return out


def local(name, whole, tp, tp_rank):
    """The part of a whole tensor that a rank of tensor parallelism has."""
    if name.endswith("linear_fc1.weight") and ".local_experts." not in name:
        gate, up = whole.chunk(2)
        return torch.cat([gate.chunk(tp)[tp_rank], up.chunk(tp)[tp_rank]])
    if "linear_qkv" in name or "word_embeddings" in name or "output_layer" in name:
        return whole.chunk(tp)[tp_rank]
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")) and ".local_experts." not in name:
        return whole.chunk(tp, dim=1)[tp_rank]
    return whole


# Megatron's model


def megatron_model(family, dtype, tied, stages, stage, first=True, last=True):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe = family in ("mixtral", "qwen3_moe")
    config = TransformerConfig(
        num_layers=stages["layers"], hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=HEAD,
        ffn_hidden_size=FFN, normalization="RMSNorm", layernorm_epsilon=1e-5, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, add_qkv_bias=family == "qwen2",
        qk_layernorm=family == "qwen3_moe", hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16, bias_activation_fusion=False, masked_softmax_fusion=False,
        tensor_model_parallel_size=stages["tp"], pipeline_model_parallel_size=stages["pp"], expert_model_parallel_size=stages["ep"],
        virtual_pipeline_model_parallel_size=stages["vp"], num_moe_experts=EXPERTS if moe else None,
        moe_ffn_hidden_size=FFN if moe else None, moe_router_topk=2, moe_router_pre_softmax=False, moe_token_dispatcher_type="alltoall",
        gradient_accumulation_fusion=False, persist_layer_norm=False, apply_rope_fusion=False, bias_dropout_fusion=False,
        sequence_parallel=moe and stages["tp"] > 1,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        num_experts=EXPERTS if moe else None, moe_grouped_gemm=False, qk_layernorm=family == "qwen3_moe", normalization="RMSNorm"
    )
    return GPTModel(
        config, spec, vocab_size=PADDED, max_sequence_length=32, pre_process=first, post_process=last, parallel_output=False,
        share_embeddings_and_output_weights=tied, position_embedding_type="rope", rotary_base=ROTARY_BASES.get(family, 10000), vp_stage=stage,
    )  # fmt: skip


def global_name(name, layers, first_expert):
    """The name of a parameter of a stage, with the numbers of its layer and expert in the whole model."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(layers[int(parts[2])])
    if "local_experts" in parts:
        at = parts.index("local_experts") + 1
        parts[at] = str(int(parts[at]) + first_expert)
    return ".".join(parts)


def fill(model, whole, stages, apply):
    from megatron.core import parallel_state as mpu

    layers = [layer.layer_number - 1 for layer in model.decoder.layers]
    first_expert = mpu.get_expert_model_parallel_rank() * (EXPERTS // stages["ep"])
    for name, parameter in model.named_parameters():
        known = global_name(name, layers, first_expert)
        value = whole.get(known, whole["embedding.word_embeddings.weight"] if "output_layer" in known else None)
        apply(parameter, local(known, value, stages["tp"], mpu.get_tensor_model_parallel_rank()))


def arguments(family, stages, dtype, tied, sharding):
    """Some of Megatron-LM's arguments."""
    from megatron.core.transformer.enums import AttnBackend

    moe = family in ("mixtral", "qwen3_moe")
    return argparse.Namespace(
        num_layers=stages["layers"], hidden_size=HIDDEN, num_attention_heads=HEADS, group_query_attention=True, num_query_groups=GROUPS,
        kv_channels=HEAD, ffn_hidden_size=FFN, padded_vocab_size=PADDED, swiglu=True, normalization="RMSNorm", norm_epsilon=1e-5,
        untie_embeddings_and_output_weights=not tied, add_qkv_bias=family == "qwen2", add_bias_linear=False, qk_layernorm=family == "qwen3_moe",
        position_embedding_type="rope", rotary_base=ROTARY_BASES.get(family, 10000), num_experts=EXPERTS if moe else None, moe_ffn_hidden_size=FFN if moe else None,
        tensor_model_parallel_size=stages["tp"], pipeline_model_parallel_size=stages["pp"], expert_model_parallel_size=stages["ep"],
        virtual_pipeline_model_parallel_size=stages["vp"], world_size=dist.get_world_size(), params_dtype=dtype, bf16=dtype == torch.bfloat16,
        use_distributed_optimizer=sharding is not None, attention_backend=AttnBackend.auto, iteration=1, consumed_train_samples=8,
    )  # fmt: skip


def rank_saves(rank, initial, name, family, stages, dtype, sharding, ckpt_format):
    pretend_gpu()
    from megatron.core import dist_checkpointing, parallel_state as mpu, tensor_parallel
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.module import Float16Module

    moe_utils.te_general_gemm = None
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    mpu.initialize_model_parallel(
        stages["tp"], stages["pp"], stages["vp"], expert_model_parallel_size=stages["ep"],
        expert_tensor_parallel_size=1 if stages["ep"] > 1 else None,
    )  # fmt: skip
    torch.manual_seed(1)
    tensor_parallel.random.initialize_rng_tracker()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.fork = lambda *_: contextlib.nullcontext()
    of_hf = model_of(family, stages["layers"])
    tied = of_hf.config.tie_word_embeddings
    weights = {key: value.to(dtype).float() for key, value in published(initial).items()}
    generator = torch.Generator().manual_seed(5)
    grads = {key: torch.randn(value.shape, generator=generator).to(dtype).float() for key, value in weights.items()}
    whole, whole_grads = to_megatron(weights), to_megatron(grads)

    chunks = []
    pp_rank = mpu.get_pipeline_model_parallel_rank()
    for stage in range(stages["vp"] or 1):
        is_first = pp_rank == 0 and stage == 0
        is_last = pp_rank == stages["pp"] - 1 and stage == (stages["vp"] or 1) - 1
        model = megatron_model(family, dtype, tied, stages, stage if stages["vp"] else None, is_first, is_last)
        fill(model, whole, stages, lambda parameter, value: parameter.data.copy_(value))
        if stages == SINGLE:
            check_logits(model, of_hf)
            if ckpt_format is None:
                return
        if dtype == torch.bfloat16:
            model = Float16Module(model.config, model)
        config = DistributedDataParallelConfig(use_distributed_optimizer=sharding is not None, bucket_size=400, overlap_grad_reduce=False)
        chunks.append(DistributedDataParallel(model.config, config, model))
    settings = OptimizerConfig(
        optimizer="adam", lr=0.01, min_lr=0.0, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=0.0,
        bf16=dtype == torch.bfloat16, params_dtype=dtype, use_distributed_optimizer=sharding is not None,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, chunks)
    # As Megatron's scheduler of the optimizer does before a step.
    for group in optimizer.param_groups:
        group["weight_decay"] *= group["wd_mult"]
    bare = [chunk.module.module if dtype == torch.bfloat16 else chunk.module for chunk in chunks]
    for model in bare:
        fill(model, whole_grads, stages, lambda parameter, value: parameter.main_grad.copy_(value))
    optimizer.step()

    folder = FOLDER / name
    state = {"args": arguments(family, stages, dtype, tied, sharding), "checkpoint_version": 3.0, "iteration": 1}
    scheduler = {"max_lr": 0.01, "lr_warmup_steps": 0, "num_steps": 8, "lr_decay_style": "constant"}
    keys = ["model"] if len(bare) == 1 else [f"model{number}" for number in range(len(bare))]
    rng = [{"torch_rng_state": torch.get_rng_state()[:64].clone(), "random_rng_state": (3, (1, 2, 3), None)}]
    if ckpt_format == "torch_dist":
        metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        if sharding is not None:
            metadata |= {"distrib_optim_sharding_type": sharding}
        metadata |= {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
        for key, model in zip(keys, bare):
            state[key] = model.sharded_state_dict(metadata=metadata)
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
        state |= {"opt_param_scheduler": scheduler, "num_floating_point_operations_so_far": 0}
        places = (stages["pp"], stages["tp"]), (pp_rank, mpu.get_tensor_model_parallel_rank())
        replica = mpu.get_data_parallel_rank(with_context_parallel=True)
        state["rng_state"] = dist_checkpointing.ShardedObject("rng_state", rng, *places, replica_id=replica)
        del metadata["dp_cp_group"]
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
        folder /= "iter_0000001"
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(state, str(folder), strategy, content_metadata=metadata)
        plain = dist_checkpointing.load_plain_tensors(str(folder))
        if rank == 0:
            save_file({key: value.clone().contiguous() for key, value in plain.items() if isinstance(value, torch.Tensor)}, FOLDER / f"plain_{name}.safetensors")
    else:
        save_ranks(folder, state | dict(zip(keys, (model.state_dict_for_save_checkpoint() for model in bare))), optimizer, rng, scheduler, sharding)
    if rank == 0:
        (FOLDER / name / "latest_checkpointed_iteration.txt").write_text("1")
        expect(FOLDER / f"expected_{name}.safetensors", weights, grads, dtype)
        shutil.copy(initial / "config.json", FOLDER / f"expected_{name}.json")


def save_ranks(folder, state, optimizer, rng, scheduler, sharding):
    """The folders of `--ckpt-format torch`."""
    from megatron.core import parallel_state as mpu

    path = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        path += f"_{mpu.get_pipeline_model_parallel_rank():03d}"
    if mpu.get_expert_model_parallel_world_size() > 1:
        path += f"_{mpu.get_expert_model_parallel_rank():03d}"
    path = folder / "iter_0000001" / path
    path.mkdir(parents=True, exist_ok=True)
    if sharding is not None:
        optimizer.save_parameter_state(str(path / "distrib_optim.pt"))
    if mpu.get_data_parallel_rank() == 0 or mpu.get_expert_data_parallel_rank() == 0:
        state["optimizer"] = optimizer.state_dict()
        state |= {"opt_param_scheduler": scheduler, "rng_state": rng, "num_floating_point_operations_so_far": 0}
        torch.save(state, path / "model_optim_rng.pt")


def check_logits(model, of_hf):
    """Megatron's model computes what that of transformers does."""
    ids = torch.arange(10)[None] * 3 % VOCAB
    places = torch.arange(10)[None]
    mask = torch.ones(10, 10).triu(1).bool()[None, None]
    with torch.no_grad():
        ours = model.float()(ids, places, mask)[..., :VOCAB]
        theirs = of_hf.float()(input_ids=ids).logits
    difference = (ours - theirs).abs().max().item()
    assert difference < 1e-5, difference
    print("logits differ by", difference)


def expect(path, weights, grads, dtype):
    """The same step by `torch.optim.AdamW`: biases and norms do not decay."""
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in weights.items()}
    decays = lambda name: parameters[name].dim() > 1
    groups = [{"params": [p for n, p in parameters.items() if decays(n) == flag], "weight_decay": 0.1 * flag} for flag in (1, 0)]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for name, parameter in parameters.items():
        parameter.grad = grads[name].clone()
    adamw.step()
    tensors = {}
    for name, parameter in parameters.items():
        tensors[f"model.{name}"] = parameter.detach().to(dtype)
        for key in ["exp_avg", "exp_avg_sq"]:
            tensors[f"optim.state.{name}.{key}"] = adamw.state[parameter][key]
        if dtype != torch.float32:
            tensors[f"optim.state.{name}.fp32_param"] = parameter.detach()
    save_file(tensors, path)


def stages(tp=1, pp=1, vp=None, ep=1, layers=2):
    return {"tp": tp, "pp": pp, "vp": vp, "ep": ep, "layers": layers}


SINGLE = stages()
BF16, F32 = torch.bfloat16, torch.float32
SETS = [
    # name, family, stages, dtype, states of the distributed optimizer, format (None: logits alone are compared), processes
    ("single", "llama", SINGLE, F32, None, "torch_dist", 1),
    ("single_qwen2", "qwen2", SINGLE, F32, None, "torch_dist", 1),
    ("single_mixtral", "mixtral", SINGLE, F32, None, None, 1),
    ("single_qwen3_moe", "qwen3_moe", SINGLE, F32, None, None, 1),
    ("reshardable", "llama", stages(tp=2), BF16, "fully_reshardable", "torch_dist", 4),
    ("dp_reshardable", "llama", stages(pp=2), BF16, "dp_reshardable", "torch_dist", 4),
    ("experts", "mixtral", stages(ep=2), BF16, "fully_reshardable", "torch_dist", 2),
    ("pipeline", "qwen3_moe", stages(pp=2, ep=2), BF16, "fully_reshardable", "torch_dist", 4),
    ("ranks", "llama", stages(tp=2, pp=2, vp=2, layers=4), BF16, None, "torch", 4),
    ("ranks_dist", "qwen2", stages(tp=2), BF16, "legacy", "torch", 4),
    ("ranks_experts", "mixtral", stages(ep=2), F32, None, "torch", 2),
]

if __name__ == "__main__":
    chosen = sys.argv[1:]
    if not chosen:
        shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, *settings, ranks in SETS:
        if not chosen or name in chosen:
            shutil.rmtree(FOLDER / name, ignore_errors=True)
            initial = pathlib.Path(tempfile.mkdtemp())
            model_of(settings[0], settings[1]["layers"]).save_pretrained(initial)
            run_ranks(rank_saves, initial, name, *settings, ranks=ranks)
            shutil.rmtree(initial)
            print("saved", name)
