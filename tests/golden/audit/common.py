"""What the scripts of this folder share: tiny models, batches, run files and expected verdicts."""

import json
import pathlib
import re
import shutil
import sys
import warnings

import torch

warnings.simplefilter("ignore")
torch.set_num_threads(1)

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[2] / "scripts"))
VOCAB, SEQ, ROWS, RANKS, MICRO = 32, 16, 2, 2, 2  # rows of a micro-batch, ranks, micro-batches of a rank
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
STEPS, WARMUP, SAVED_AFTER = 20, 3, 6
MICRO_ALL = RANKS * MICRO

# Models

ROPE = {"rope_type": "default", "rope_theta": 500000.0}
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    initializer_range=0.2,
    rope_parameters=ROPE,
    attention_dropout=0.0,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    use_cache=False,
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0}
MIXTURE = dict(
    num_local_experts=4,
    num_experts_per_tok=2,
    output_router_logits=True,
    router_aux_loss_coef=0.05,
    intermediate_size=8,
)
# One layer sees all and one has a window, each with rotary positions of its own.
GEMMA3 = dict(
    layer_types=["sliding_attention", "full_attention"], sliding_window=4, query_pre_attn_scalar=8,
    rope_parameters={"full_attention": ROPE, "sliding_attention": ROPE | {"rope_theta": 10000.0}},
    tie_word_embeddings=True,
)  # fmt: skip
GPT2 = dict(
    vocab_size=VOCAB, n_positions=64, n_embd=16, n_layer=2, n_head=2, n_inner=12, initializer_range=0.2,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, use_cache=False,
)  # fmt: skip


def config(family, **changes):
    """The configuration of a tiny model; `changes` override its values."""
    from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config

    kinds = {
        "llama": (LlamaConfig, SIZES),
        "llama3": (LlamaConfig, SIZES | {"rope_parameters": LLAMA3}),
        "qwen2-tied": (
            Qwen2Config,
            {k: v for k, v in SIZES.items() if k != "head_dim"} | {"tie_word_embeddings": True},
        ),
        "linear": (LlamaConfig, SIZES | {"rope_parameters": LINEAR}),
        "mistral": (MistralConfig, SIZES | {"sliding_window": 4}),
        "mixtral": (MixtralConfig, SIZES | MIXTURE),
        "gpt2": (GPT2Config, GPT2),
        "gemma3": (Gemma3TextConfig, SIZES | GEMMA3),
    }
    kind, values = kinds[family]
    name = kind.__name__.replace("Text", "").replace("Config", HEADS.get(family, "ForCausalLM"))
    return kind(**(values | changes), architectures=[name])


HEADS = {"gpt2": "LMHeadModel"}
WRAP = {"llama": "LlamaDecoderLayer", "llama3": "LlamaDecoderLayer", "qwen2-tied": "Qwen2DecoderLayer"}
WRAP |= {"linear": "LlamaDecoderLayer", "mistral": "MistralDecoderLayer", "gemma3": "Gemma3DecoderLayer"}
WRAP |= {"mixtral": "MixtralDecoderLayer", "gpt2": "GPT2Block"}


# As `[adapter]` of a run file.
LORA = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def model(family, seed=0, adapter=None, **changes):
    """A model whose norms and biases differ from 1 and 0, so that each of them shows."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config(family, **changes)).float()
    for name, parameter in made.named_parameters():
        if "norm" in name or "ln_" in name or name.endswith("bias"):
            parameter.data += 0.2 * torch.randn_like(parameter)
    if adapter:
        from peft import LoraConfig, get_peft_model

        values = dict(r=adapter["rank"], lora_alpha=adapter["alpha"], target_modules=adapter["target_modules"])
        made = get_peft_model(made, LoraConfig(task_type="CAUSAL_LM", **values))
    return made.train()


def decays(name):
    """Whether weight decay applies to a parameter: not to norms and biases."""
    return not any(part in name for part in ("norm", "ln_", "bias"))


def groups(named, decay=DECAY, on_all=False):
    """The two groups of the optimizer, with and without decay."""
    split = {True: [], False: []}
    for name, parameter in named:
        if parameter.requires_grad:
            split[on_all or decays(name)].append(parameter)
    made = [{"params": split[True], "weight_decay": decay}, {"params": split[False], "weight_decay": 0.0}]
    return [group for group in made if group["params"]]


def rate(step):
    """Warm-up from zero and a cosine to zero, as transformers' `cosine`; `step` counts from 0."""
    if step < WARMUP:
        return LR * step / WARMUP
    part = (step - WARMUP) / (STEPS - WARMUP)
    return LR * 0.5 * (1.0 + torch.tensor(part * torch.pi, dtype=torch.float64).cos().item())


def published(name):
    """Names under which files have a parameter: transformers holds the experts of a layer as two tensors, files each."""
    layer, found, rest = name.partition(".mlp.")
    layer += ".block_sparse_moe."
    matrices = {"experts.gate_up_proj": ("w1", "w3"), "experts.down_proj": ("w2",)}.get(rest)
    if found and matrices:
        experts = range(MIXTURE["num_local_experts"])
        return [f"{layer}experts.{expert}.{matrix}.weight" for expert in experts for matrix in matrices]
    return [layer + rest] if rest == "gate.weight" else [name.removeprefix("base_model.model.").replace(".default", "")]


# Batches: a list of micro-batches in the order of the data, each a dictionary of tensors of ROWS x SEQ


def walk(generator, count):
    """Ids from 1 in which the next is one of three functions of the last; 0 is left for padding."""
    ids = [int(torch.randint(1, VOCAB, (), generator=generator))]
    for jump in torch.randint(0, 3, (count - 1,), generator=generator).tolist():
        ids.append((5 * ids[-1] + (3, 7, 20)[jump]) % (VOCAB - 1) + 1)
    return torch.tensor(ids)


# Lengths of prompt and text of the rows of each micro-batch: micro-batches and ranks have very different counts.
LENGTHS = [[(5, 16), (3, 13)], [(8, 12), (2, 16)], [(10, 14), (6, 8)], [(9, 12), (7, 15)]]
# Lengths of the documents of the rows.
DOCUMENTS = [[(6, 10), (9, 7)], [(3, 8, 5), (16,)], [(11, 5), (4, 12)], [(8, 8), (5, 4, 7)]]


def padded(seed, prompts=True):
    """A text per row, behind a prompt that does not count, padded on the right."""
    generator, made = torch.Generator().manual_seed(seed), []
    for lengths in LENGTHS:
        ids, labels = torch.zeros(ROWS, SEQ, dtype=torch.int64), torch.full((ROWS, SEQ), -100)
        mask = torch.zeros(ROWS, SEQ, dtype=torch.int64)
        for row, (prompt, length) in enumerate(lengths):
            ids[row, :length] = walk(generator, length)
            first = prompt if prompts else 0
            labels[row, first:length] = ids[row, first:length]
            mask[row, :length] = 1
        made.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return made


def packed(seed):
    """Documents behind each other in a row; positions begin again with each, whose first token is not a target."""
    generator, made = torch.Generator().manual_seed(seed), []
    for documents in DOCUMENTS:
        rows = [[walk(generator, length) for length in row] for row in documents]
        ids = torch.stack([torch.cat(row) for row in rows])
        positions = torch.stack([torch.cat([torch.arange(len(text)) for text in row]) for row in rows])
        labels = ids.masked_fill(positions == 0, -100)
        made.append({"input_ids": ids, "labels": labels, "position_ids": positions})
    return made


def plain(seed):
    """Whole rows, all of which count."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.stack([walk(generator, SEQ) for _ in range(ROWS)]) for _ in range(MICRO_ALL)]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in rows]


def shifted(micro):
    """As data loaders of torchtitan and Megatron give it: labels are those of the next token."""
    cut = {key: value[:, :-1] for key, value in micro.items()}
    return cut | {"labels": micro["labels"][:, 1:]}


BATCHES = {"padded": padded, "packed": packed, "plain": plain}


# Files


RUN = """\
[model]
path = "{path}"
{init}{adapter}
[train]
steps = {steps}
micro_batch_size = {rows}
global_batch_size = {all_rows}
{clip}lr_schedule = {schedule}

[train.optimizer]
name = "adamw"
lr = {lr}
betas = {betas}
eps = {eps}
weight_decay = {decay}
no_decay = {no_decay}

[fsdp]
wrap = ["{wrap}"]
{dtype}"""
COSINE = f'{{ name = "warmup-cosine", warmup_steps = {WARMUP}, start_factor = 0 }}'


def write_run(file, family, path=".", init="random", clip=None, adapter=None, dtype="", schedule=COSINE):
    """The run as it should be. `no_decay` must match something, so its patterns are those of the family."""
    no_decay = {"gpt2": ["ln_", "bias"], "qwen2-tied": ["norm", "bias"]}.get(family, ["norm"])
    adapter = adapter and "".join(f"{key} = {json.dumps(value)}\n" for key, value in adapter.items())
    values = dict(
        steps=STEPS, rows=ROWS, all_rows=ROWS * MICRO_ALL, schedule=schedule, lr=LR, betas=list(BETAS), eps=EPS
    )
    text = RUN.format(
        **values,
        path=path,
        init="" if init == "random" else f'init = "{init}"\n',
        decay=DECAY,
        wrap=WRAP[family],
        no_decay=json.dumps([] if adapter else no_decay),
        adapter=f"\n[adapter]\n{adapter}" if adapter else "",
        dtype=dtype,
        clip="" if clip is None else f"grad_clip = {clip}\n",
    )
    file.write_text(text)


def expect_case(
    folder,
    case,
    model,
    cause=None,
    params=None,
    factor=None,
    data="padded",
    run="run.toml",
    after=None,
    shifted=False,
    **more,
):
    """The verdict on a case, and its files, relative to the folder. `params` is a regular expression of names."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    found = [name for name in trained if params and re.search(params, name)]
    expected = {
        "verdict": "findings" if cause else "sound",
        "cause": cause,
        "params": sorted(sum((published(name) for name in found), [])),
        "factor": factor,
        "run": run,
        "before": "before",
        "after": f"{after or case}/after",
        "batch": f"{data}.safetensors",
        "shifted": shifted,
    } | more
    (folder / case).mkdir(exist_ok=True)
    (folder / case / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def fresh(*parts):
    """An empty folder below this one."""
    path = HERE.joinpath(*parts)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
