"""Reads what the frameworks have saved, with their own tools: weights and the optimizer's states, by names in memory."""

import contextlib
import io
import pathlib
import shutil
import tempfile
from dataclasses import dataclass

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import common


@dataclass
class State:
    weights: dict
    states: dict


def dcp(path):
    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(path, file.name)
        return torch.load(file.name, weights_only=False)


def numbered(model, states):
    """States by number, in the order of the groups of the optimizer."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    order = [name for name, _ in named if common.decays(name)] + [name for name, _ in named if not common.decays(name)]
    return {name: states[at] for at, name in enumerate(order)}


def zero(path):
    """Shards of DeepSpeed: its own tool for the weights; moments are cut from flat groups as the weights are."""
    weights = zero_to_fp32(path)
    states = {name: {} for name in weights}
    folder = path / (path / "latest").read_text()
    for key in ("exp_avg", "exp_avg_sq"):
        with tempfile.TemporaryDirectory() as copy:
            step = replace_weights(folder, f"{copy}/{folder.name}", key)
            (pathlib.Path(copy) / "latest").write_text(folder.name)
            for name, tensor in zero_to_fp32(copy).items():
                states[name] |= {key: tensor, "step": step}
    return State(weights, states)


def zero_to_fp32(path):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(io.StringIO()):
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(path)))


def replace_weights(folder, copy, key):
    """A copy of a checkpoint that has moments in place of the weights, so that DeepSpeed's tool gives them names."""
    shutil.copytree(folder, copy)
    for file in pathlib.Path(copy).glob("*optim_states.pt"):
        saved = torch.load(file, weights_only=False)
        optimizer = saved["optimizer_state_dict"]
        flat = "fp32_flat_groups" if "fp32_flat_groups" in optimizer else "single_partition_of_fp32_groups"
        inner = optimizer.get("optimizer_state_dict") or optimizer["base_optimizer_state"]
        states = inner["state"]
        optimizer[flat] = [states[at][key].reshape(part.shape) for at, part in enumerate(optimizer[flat])]
        torch.save(saved, file)
    return float(states[0]["step"])


def read(path, model, folder):
    """A folder with a checkpoint of a run of `model`, which is in `folder`."""
    if (path / "latest").exists():
        return zero(path)
    if (path / "pytorch_model_fsdp.bin").exists():
        whole = [torch.load(path / file, weights_only=True) for file in ("pytorch_model_fsdp.bin", "optimizer.bin")]
        return State(whole[0], whole[1]["state"])
    if (path / ".metadata").exists():
        state = dcp(path)
        return State(state["model"], state["optimizer"]["state"])
    if (path / "state.pt").exists():
        state = torch.load(path / "state.pt", weights_only=True)
        return State(state["model"], state["optimizer"]["state"])
    if (path / "state.ckpt").exists():  # of Lightning, whose names begin with the attribute of the module
        state = torch.load(path / "state.ckpt", weights_only=False)
        weights = {name.removeprefix("model."): tensor for name, tensor in state["state_dict"].items()}
        return State(weights, numbered(model, state["optimizer_states"][0]["state"]))
    file = next(path / name for name in ("optimizer.bin", "optimizer.pt") if (path / name).exists())
    states = numbered(model, torch.load(file, weights_only=True)["state"])
    if (path / "adapter_model.safetensors").exists():
        adapters = load_file(path / "adapter_model.safetensors")
        base = {f"base_model.model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        names = {name.replace(".default", "").replace(".base_layer", ""): name for name in model.state_dict()}
        return State({names[name]: tensor for name, tensor in (base | adapters).items()}, states)
    weights = load_file(path / "model.safetensors")
    if any("block_sparse_moe" in name for name in weights):
        from transformers import AutoModelForCausalLM

        weights = AutoModelForCausalLM.from_pretrained(path).state_dict()
    return State({name.removeprefix("module."): tensor for name, tensor in weights.items()}, states)


def model(folder, adapter):
    """The model of a run file, in plain transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    if adapter:
        from peft import LoraConfig, get_peft_model

        values = dict(r=adapter["rank"], lora_alpha=adapter["alpha"], target_modules=adapter["target_modules"])
        made = get_peft_model(made, LoraConfig(task_type="CAUSAL_LM", **values))
    return made


def load(made, weights):
    missing, unexpected = made.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    if made.config.tie_word_embeddings:
        made.tie_weights()
