"""Write `config.transformers-4.json` beside each case's `config.json`.

usage: python legacy_config.py        (transformers 4.47.1; torch is not needed)

Transformers 5 writes `rope_parameters` and `dtype`, transformers 4 wrote `rope_theta`,
`rope_scaling` and `torch_dtype`. A reader must take both to the same model.
"""

import os
import tempfile

import transformers
from cases import CASES

assert transformers.__version__ == "4.47.1", transformers.__version__
here = os.path.dirname(os.path.abspath(__file__))
for name, (model_type, arguments, rope_theta, _) in CASES.items():
    if model_type == "llama":
        config = transformers.LlamaConfig(**arguments, rope_theta=rope_theta, torch_dtype="float32")
        config.architectures = ["LlamaForCausalLM"]
    else:
        config = transformers.GPT2Config(**arguments, torch_dtype="float32")
        config.architectures = ["GPT2LMHeadModel"]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        with open(f"{folder}/config.json") as file:
            text = file.read()
    with open(f"{here}/{name}/config.transformers-4.json", "w") as file:
        file.write(text)
    print(name)
