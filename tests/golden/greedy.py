"""Write what transformers generates with the golden models (`greedy.json`).

usage: python greedy.py      (torch 2.11.0, transformers 5.17.0)

For each folder with weights, but those for padding and balancing: a prompt, and the tokens that
`generate(do_sample=False)` appends to it, until the text is as long as the model's positions or 24 tokens. Without a
cache, because a cache keeps keys that were rotated for a shorter text. `warped`: probabilities after temperature, top-k and top-p, as transformers' own processors make them.
"""

import glob
import json
import os

import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def greedy(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(3, model.config.vocab_size, (1, 5), generator=generator)
    most = min(getattr(model.config, "n_positions", 24), 24)
    with torch.no_grad():
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, use_cache=False,
                             max_new_tokens=most - 5, eos_token_id=None, pad_token_id=0)  # fmt: skip
    return dict(prompt=prompt[0].tolist(), tokens=ids[0, 5:].tolist())


def warped(temperature, top_k, top_p):
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p:
        warpers.append(TopPLogitsWarper(top_p))
    probabilities = warpers(None, logits.clone()).softmax(-1)
    return dict(temperature=temperature, top_k=top_k, top_p=top_p, logits=logits[0].tolist(),
                probabilities=probabilities[0].tolist())  # fmt: skip


weights = glob.glob(f"{HERE}/*/model.safetensors") + glob.glob(f"{HERE}/families/*/model.safetensors")
# A row for padding and a balancing loss do not change what a model generates.
folders = sorted(map(os.path.dirname, weights))
folders = [folder for folder in folders if not folder.endswith(("-padding", "-balanced"))]
text = dict(
    greedy={os.path.relpath(folder, HERE): greedy(folder) for folder in folders},
    warped=[warped(*case) for case in [(1.0, None, None), (0.7, 4, None), (1.3, None, 0.8), (0.9, 6, 0.6), (2.0, 1, 0.99)]],
)
with open(f"{HERE}/greedy.json", "w") as file:
    json.dump(text, file, indent=1)
    file.write("\n")
print({name: len(case["tokens"]) for name, case in text["greedy"].items()})
