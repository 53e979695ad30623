"""Audits random sound steps, none of which may be accused: python sound.py FSDP [--runs 200] [--seed 0] [--keep FOLDER].

Each run draws its model, batches, optimizer, schedule and clipping from its seed, and trains with FSDP2 on two ranks or in a
plain loop. Runs that are accused or refused are kept in the folder.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import subprocess
import tempfile

import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM

import common
import fsdp2
import snippets
from faults import Fault
from make_fixtures.common import run_ranks

SMALL = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None, use_cache=False)
VOCABS, POSITIONS = (17, 32, 64, 131), 128


def config(draw, family):
    """A tiny model of a family of transformers; what decides how it computes is random, too."""
    head, shared = draw.choice([4, 8, 16]), draw.choice([1, 2, 3])
    heads = shared * draw.choice([1, 2, 3])
    theta = {"rope_type": "default", "rope_theta": draw.choice([1e4, 5e5])}
    epsilon, window = draw.choice([1e-5, 1e-6]), draw.choice([None, 4, 7])
    values = SMALL | dict(
        vocab_size=draw.choice(VOCABS), hidden_size=heads * head, intermediate_size=draw.choice([8, 12, 40]),
        num_hidden_layers=draw.randint(1, 3), num_attention_heads=heads, num_key_value_heads=shared, rope_parameters=theta,
        max_position_embeddings=POSITIONS, rms_norm_eps=epsilon, initializer_range=draw.choice([0.02, 0.1, 0.2]),
        attention_dropout=0.0, tie_word_embeddings=draw.random() < 0.3,
    )  # fmt: skip
    bias, soft = draw.random() < 0.3, dict(query_pre_attn_scalar=head, hidden_activation="gelu_pytorch_tanh")
    experts = dict(num_experts_per_tok=draw.choice([1, 2]), output_router_logits=True, router_aux_loss_coef=0.05)
    more = {
        "Llama": dict(attention_bias=bias, mlp_bias=draw.random() < 0.3),
        "Qwen2": {},
        "Qwen3": dict(attention_bias=bias, head_dim=head),
        "Mistral": dict(sliding_window=window),
        "Gemma2": soft | dict(sliding_window=4, attn_logit_softcapping=3.0, final_logit_softcapping=5.0, head_dim=head),
        "Phi3": dict(sliding_window=window, resid_pdrop=0.0, embd_pdrop=0.0),
        "Olmo2": {},
        "Starcoder2": dict(norm_epsilon=epsilon, use_bias=bias, residual_dropout=0.0, embedding_dropout=0.0),
        "Mixtral": experts | dict(num_local_experts=draw.choice([2, 4])),
        "Qwen3Moe": experts | dict(num_experts=draw.choice([2, 4]), moe_intermediate_size=8, norm_topk_prob=bias),
    }
    if family == "GPT2":
        values = common.GPT2 | dict(vocab_size=values["vocab_size"], n_embd=heads * head, n_head=heads)
        return transformers.GPT2Config(**values)
    return getattr(transformers, f"{family}Config")(**(values | more[family]))


FAMILIES = ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Phi3", "Olmo2", "Starcoder2", "Mixtral", "Qwen3Moe", "GPT2"]
DENSE = ("Llama", "Qwen2", "Qwen3", "Mistral")  # for adapters and 16 bits


def model_of(run, folder):
    """The model; the base of adapters is written to `folder`, too, unless it is None."""
    torch.manual_seed(run["seed"])
    made = AutoModelForCausalLM.from_config(run["config"], attn_implementation="eager").float()
    for name, parameter in made.named_parameters():
        if "norm" in name or "ln_" in name or name.endswith("bias"):
            parameter.data += 0.2 * torch.randn_like(parameter)
    if run["adapter"]:
        from peft import LoraConfig, get_peft_model

        if folder:
            made.save_pretrained(folder)
        values = dict(r=run["adapter"]["rank"], lora_alpha=run["adapter"]["alpha"])
        values["target_modules"] = run["adapter"]["target_modules"]
        made = get_peft_model(made, LoraConfig(task_type="CAUSAL_LM", **values))
    return (made.bfloat16() if run["dtype"] == "pure" else made).train()


def batch_of(run, seed):
    """Micro-batches of random lengths: whole rows, padding on either side behind prompts, documents, or few targets."""
    draw, generator, made = random.Random(seed), torch.Generator().manual_seed(seed), []
    for _ in range(run["micro"]):
        length = draw.choice([4, 9, 16, 24])
        ids = torch.randint(1, run["config"].vocab_size, (run["rows"], length), generator=generator)
        micro, labels = {}, ids.clone()
        if run["data"] in ("right", "left"):
            mask = torch.zeros_like(ids)
            for row in range(run["rows"]):
                size = draw.randint(2, length)
                text = slice(0, size) if run["data"] == "right" else slice(length - size, length)
                mask[row, text] = 1
                labels[row, : text.start + draw.choice([1, size // 2])] = -100  # a prompt of at least one token
            ids, labels = ids * mask, labels.masked_fill(mask == 0, -100)
            micro["attention_mask"] = mask
        elif run["data"] == "packed":
            positions = torch.zeros_like(ids)
            for row in range(run["rows"]):
                at = 0
                while at < length:
                    size = min(draw.randint(2, 8), length - at)
                    positions[row, at : at + size] = torch.arange(size)
                    at += size
            labels = ids.masked_fill(positions == 0, -100)
            micro["position_ids"] = positions
        elif run["data"] == "few":
            labels[:, : -draw.choice([1, 2, 3])] = -100
        made.append({"input_ids": ids, "labels": labels, **micro})
    if not sum(map(fsdp2.targets, made)):
        return batch_of(run, seed + 1_000_003)
    return made


def drawn(seed):
    """What a run is, the same on all ranks."""
    draw, family = random.Random(seed), FAMILIES[seed % len(FAMILIES)]
    run = dict(seed=seed, family=family, config=config(draw, family), fsdp=draw.random() < 0.3)
    run |= dict(dtype="f32", adapter=None, data=draw.choice(["plain", "right", "left", "packed", "few"]))
    run |= dict(rows=draw.randint(1, 3), micro=4 if run["fsdp"] else draw.randint(1, 6), steps=draw.choice([1, 3]))
    if family in DENSE:
        run["dtype"] = draw.choice(["f32", "f32", "mixed" if run["fsdp"] else "autocast", "pure"])
    if family in DENSE and run["dtype"] == "f32" and draw.random() < 0.4:
        targets = draw.choice([["q_proj", "v_proj"], ["q_proj", "down_proj"], ["gate_proj"]])
        run["adapter"] = dict(rank=draw.choice([1, 2, 4]), alpha=float(draw.choice([2, 8])), target_modules=targets)
    if family in ("Mixtral", "Qwen3Moe") and run["data"] == "left":
        run["data"] = "right"  # the balancing loss of routers cannot be judged with padding in front
    run |= dict(lr=draw.choice([1e-6, 3e-4, 1e-2, 1e-1]), eps=draw.choice([1e-8, 1e-6]), decay=draw.choice([0.0, 0.1, 0.5]))
    run |= dict(betas=draw.choice([(0.9, 0.999), (0.9, 0.95), (0.8, 0.99)]), clip=draw.choice([None, None, 0.01, 1.0, 1e3]))
    run |= dict(kind=draw.choice(["foreach", "loop", "fused"]), schedule=draw.choice(["constant", "linear", "cosine"]))
    return run | dict(warmup=draw.choice([0, 2, 10]), total=draw.choice([5, 20, 1000]))


def rate(run, step):
    if step < run["warmup"]:
        return run["lr"] * step / run["warmup"]
    part = (step - run["warmup"]) / max(1, run["total"] - run["warmup"])
    curves = {"constant": 1.0, "linear": 1 - part, "cosine": 0.5 * (1 + torch.tensor(part * torch.pi).double().cos())}
    return run["lr"] * float(curves[run["schedule"]])


def step_of(run, model, optimizer, at, rank):
    batch = batch_of(run, 1000 * run["seed"] + at)
    with torch.autocast("cpu", torch.bfloat16, enabled=run["dtype"] == "autocast"):
        if run["fsdp"]:
            fsdp2.backward(model, batch, rank, Fault())
        else:
            backward(model, batch)
    if run["clip"]:
        torch.nn.utils.clip_grad_norm_(model.parameters(), run["clip"])
    for group in optimizer.param_groups:
        group["lr"] = rate(run, at)
    optimizer.step()
    optimizer.zero_grad()
    return batch


def backward(model, batch):
    count_all = sum(map(fsdp2.targets, batch))
    coefficient = getattr(model.config, "router_aux_loss_coef", 0.0)
    for micro in batch:
        loss, count, auxiliary = fsdp2.loss_of(model, micro)
        if auxiliary is not None:
            loss = loss + coefficient * count * auxiliary
        (loss / count_all).backward()


def write(run, model, folder):
    """The run file, and what else the audit reads."""
    run["config"].save_pretrained(folder)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    no_decay = [] if run["adapter"] else [p for p in ("norm", "ln_", "bias") if any(p in name for name in names)]
    shape = {"constant": "constant", "linear": "linear", "cosine": "warmup-cosine"}[run["schedule"]]
    text = common.RUN.format(
        path=".", init='init = "pretrained"\n' if run["adapter"] else "", rows=run["rows"],
        all_rows=run["rows"] * run["micro"], steps=run["total"], lr=run["lr"], betas=list(run["betas"]), eps=run["eps"],
        adapter="\n[adapter]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in (run["adapter"] or {}).items())
        if run["adapter"] else "", clip=f"grad_clip = {run['clip']}\n" if run["clip"] else "", decay=run["decay"],
        no_decay=json.dumps(no_decay), dtype="" if run["dtype"] == "f32" else 'param_dtype = "bf16"\n',
        wrap=type(fsdp2.layers(model)[0]).__name__.removeprefix("FSDP"),
        schedule=f'{{ name = "{shape}", warmup_steps = {run["warmup"]}, start_factor = 0 }}',
    )  # fmt: skip
    (folder / "run.toml").write_text(text)


def made(run, folder, rank):
    """Trains up to the audited step and past it, and writes everything that its audit needs."""
    model = model_of(run, folder if rank == 0 else None)
    if rank == 0:
        write(run, model, folder)
    if run["fsdp"]:
        model = fsdp2.shard(model, run["dtype"] == "mixed")
    kinds = {"foreach": dict(foreach=True), "loop": dict(foreach=False), "fused": dict(fused=True)}
    groups = common.groups(model.named_parameters(), run["decay"])
    settings = dict(lr=run["lr"], betas=run["betas"], eps=run["eps"])
    optimizer = torch.optim.AdamW(groups, **settings, **kinds[run["kind"]])
    for at in range(run["steps"]):
        step_of(run, model, optimizer, at, rank)
    fsdp2.save(model, optimizer, folder / "before", "file")
    batch = step_of(run, model, optimizer, run["steps"], rank)
    fsdp2.save(model, optimizer, folder / "after", "file")
    if rank == 0:
        tensors = {f"m{at}.{key}": value.contiguous() for at, micro in enumerate(batch) for key, value in micro.items()}
        snippets.run("save-batch", {})["save_file"](tensors, folder / "batch.safetensors", {"ranks": "1"})


def rank(rank, program, seeds, keep):
    dist.init_process_group("gloo")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    counts = {"sound": 0, "accused": 0, "refused": 0}
    for seed in seeds:
        run, folder = drawn(seed), keep / str(seed)
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        if run["fsdp"] or rank == 0:
            made(run, folder, rank)
        if rank == 0:
            verdict, said = judged(program, folder)
            counts[verdict] += 1
            if verdict == "sound":
                shutil.rmtree(folder)
            else:
                shown = {key: value for key, value in run.items() if key != "config"}
                print(f"{verdict}: {shown}\n  {said}", flush=True)
        dist.barrier()
    if rank == 0:
        print(counts)


def judged(program, folder):
    files = ["--before", "before", "--after", "after", "--batch", "batch.safetensors", "--json"]
    # Else it would be one of the ranks that these variables name, and wait for the others.
    alone = {key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD_", "LOCAL_", "MASTER_"))}
    done = subprocess.run([program, "audit", "run.toml", *files], cwd=folder, env=alone, capture_output=True, text=True)
    if done.returncode in (0, 1):
        report = json.loads(done.stdout)
        return ("sound" if done.returncode == 0 else "accused"), [found["text"] for found in report["findings"]]
    return "refused", done.stderr[-500:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("fsdp", type=pathlib.Path)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "sound-runs")
    given = parser.parse_args()
    run_ranks(rank, given.fsdp.resolve(), range(given.seed, given.seed + given.runs), given.keep.resolve())
