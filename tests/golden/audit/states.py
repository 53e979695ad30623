"""Reads what the frameworks have saved, with their own tools: weights and states of the optimizer by names of Hugging Face."""

import tempfile
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


@dataclass
class State:
    weights: dict
    states: dict


def read(path, setting):
    """A folder with a checkpoint; `setting` has the configuration."""
    if (path / ".metadata").exists():
        with tempfile.NamedTemporaryFile() as file:
            dcp_to_torch_save(path, file.name)
            state = torch.load(file.name, weights_only=False)
        return State(state["model"], state["optimizer"]["state"])
    state = torch.load(path / "state.pt", weights_only=True)
    return State(state["model"], state["optimizer"]["state"])


def model(folder, adapter, weights):
    """The model of the run file with weights of a state, in plain transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    missing, unexpected = made.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    made.tie_weights()
    return made.train()
