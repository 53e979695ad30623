"""Writes the folders of this one: python make.py [NAME ..]; without names, all. See README.md for versions."""

import importlib
import sys

from settings import SETTINGS

# Folder -> module that makes it; others are settings of FSDP2.
OTHERS = {"accelerate-ddp": "accelerate_runs", "accelerate-fsdp2": "accelerate_runs"}
OTHERS |= {f"trainer-{model}": "trainer_runs" for model in ("llama", "mixtral", "lora", "ddp", "gpt2")}
OTHERS["torch-optimizers"] = "optimizer_runs"
OTHERS["lightning-llama"] = "lightning_runs"
OTHERS |= {f"deepspeed-{kind}": "deepspeed_runs" for kind in ("zero2", "zero2-bf16", "zero3")}

if __name__ == "__main__":
    for setting in SETTINGS:
        if not sys.argv[1:] or setting.name in sys.argv[1:]:
            importlib.import_module("fsdp2").make(setting)
    for name, module in OTHERS.items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            importlib.import_module(module).make(name)
