"""Write the golden files of adapters from PEFT: `<case>/lora` and `<case>/dora`, beside the models of generate.py and families.py.

usage: python lora.py [CASE ..]      (torch, transformers and peft as in README.md)

An adapter with every element drawn from a seed (PEFT's own B is zero, which hides half of the mathematics), as PEFT saves
it, and what three steps of AdamW make of it. Magnitudes of DoRA are near the lengths of rows, as they are. One thread, CPU, no network.
"""

import json
import os
import shutil
import sys

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

STEPS = 3
HERE = os.path.dirname(os.path.abspath(__file__))

# (case, folder) -> (arguments of LoraConfig, seed)
ADAPTERS = {
    # Fused queries, keys and values of which two are adapted; a pair of which one is; a module that is trained whole.
    ("llama-gqa", "lora"): (
        dict(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], modules_to_save=["lm_head"]),
        201,
    ),
    # Conv1D, whose weights are stored inputs x outputs; all linear maps; rank-stabilised.
    ("gpt2", "lora"): (dict(r=2, lora_alpha=3, target_modules="all-linear", use_rslora=True, fan_in_fan_out=True), 202),
    # Fused queries, keys and values of which two are adapted; without and with biases.
    ("llama-gqa", "dora"): (
        dict(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], modules_to_save=["lm_head"], use_dora=True),
        203,
    ),
    ("gpt2", "dora"): (
        dict(r=2, lora_alpha=3, target_modules="all-linear", use_rslora=True, use_dora=True, fan_in_fan_out=True),
        204,
    ),
    # Both stacks of experts, of which PEFT wraps one inside the other; gate and up have one A.
    ("families/qwen3_moe", "lora"): (
        dict(
            r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"],
            target_parameters=["mlp.experts.down_proj", "mlp.experts.gate_up_proj"],
        ),
        205,
    ),
    # Stacks inputs x outputs with biases, of which one is adapted, and no linear map; rank-stabilised.
    ("families/gpt_oss", "lora"): (
        dict(r=2, lora_alpha=3, use_rslora=True, target_modules=[], target_parameters=["experts.gate_up_proj"]),
        206,
    ),
}  # fmt: skip


def write_adapter(case, kind, base, config, seed):
    folder = os.path.join(HERE, case)
    out = os.path.join(folder, kind)
    shutil.rmtree(out, ignore_errors=True)
    model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    trained = list(named.values())
    for name, parameter in named.items():
        noise = torch.randn(parameter.shape, generator=generator) * 0.2
        parameter.data = parameter.data * (1 + noise) if "lora_magnitude_vector" in name else noise
    # Names as they are saved, for the parameters themselves.
    names = {tensor.data_ptr(): name for name, tensor in get_peft_model_state_dict(model).items()}
    name_of = lambda parameter: names[parameter.data_ptr()]
    model.save_pretrained(out)
    os.remove(os.path.join(out, "README.md"))
    config = os.path.join(out, "adapter_config.json")
    with open(config) as file:
        fields = json.load(file) | {"base_model_name_or_path": case}
    # Sets, whose order is that of the day.
    for key in ["target_modules", "target_parameters"]:
        fields[key] = fields[key] and sorted(fields[key])
    with open(config, "w") as file:
        json.dump(fields, file, indent=2)
        file.write("\n")
    ids = load_file(os.path.join(folder, "expected.safetensors"))["ids"]
    expected = {}
    model.train()

    def loss_of():
        logits = model(ids[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].reshape(-1))

    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            expected |= {f"grad.{name_of(p)}": p.grad.clone() for p in trained}
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(trained, 1.0).item())
        optimizer.step()
    expected["losses"], expected["grad_norms"] = torch.tensor(losses), torch.tensor(norms)
    expected |= {f"adamw3.{name_of(p)}": p.detach().clone() for p in trained}
    save_file({k: v.contiguous() for k, v in expected.items()}, os.path.join(out, "expected.safetensors"))
    for name in os.listdir(out):
        os.chmod(os.path.join(out, name), 0o644)
    print(case, kind, losses, norms, sorted(os.listdir(out)))


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    wanted = sys.argv[1:]
    for (case, kind), (arguments, seed) in ADAPTERS.items():
        if wanted and case not in wanted:
            continue
        base = AutoModelForCausalLM.from_pretrained(os.path.join(HERE, case), attn_implementation="eager")
        write_adapter(case, kind, base, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **arguments), seed)


if __name__ == "__main__":
    main()
