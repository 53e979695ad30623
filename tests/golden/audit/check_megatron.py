"""Runs the example for Megatron-LM of docs/auditing-reference.md in the schedule of megatron-core, and reads the batch that it wrote.

Two ranks with two micro-batches each. Megatron's own models need a GPU, so the model is a Llama of transformers.
"""

import pathlib
import tempfile
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.enums import ModelType
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from safetensors.torch import load_file

import common
import snippets
from make_fixtures.common import run_ranks


def given(micro):
    """What Megatron's `get_batch` gives: tokens, labels of the next token, which of them count, and positions."""
    labels = torch.roll(micro["input_ids"], -1, 1)[:, :-1]
    counts = common.shifted(micro)["labels"] != -100
    return micro["input_ids"][:, :-1], labels, counts.float(), micro["position_ids"][:, :-1]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = common.model("llama")
        self.config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2)
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, _):
        pass


def rank(rank, folder):
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    sizes = dict(global_batch_size=common.ROWS * common.MICRO_ALL, micro_batch_size=common.ROWS)
    num_microbatches_calculator.init_num_microbatches_calculator(rank, None, **sizes, data_parallel_size=common.RANKS)
    batch = common.packed(common.SAVED_AFTER)
    mine = batch[rank * common.MICRO : (rank + 1) * common.MICRO]
    scope = dict(args=SimpleNamespace(curr_iteration=6, reset_position_ids=True), audited_step=6, micro_batches=[])
    scope |= dict(torch=torch, save_batch=lambda _, *rest: snippets.save_batch(folder / "batch.safetensors", *rest))

    def forward_step(data_iterator, model):
        tokens, labels, loss_mask, position_ids = next(data_iterator)
        snippets.run("megatron", scope | dict(tokens=tokens, labels=labels, loss_mask=loss_mask, position_ids=position_ids))
        logits = model.inner(tokens, position_ids=position_ids).logits
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * loss_mask.flatten()).sum(), lambda loss: (loss, {"loss": loss.detach()})

    step = dict(forward_step_func=forward_step, data_iterator=map(given, mine), model=Model(), num_microbatches=common.MICRO)
    zeros = torch.zeros
    torch.zeros = lambda *sizes, **settings: zeros(*sizes, **settings | {"device": "cpu"})  # Megatron counts tokens on a GPU
    get_forward_backward_func()(**step, seq_length=common.SEQ, micro_batch_size=common.ROWS)
    dist.barrier()
    if rank == 0:
        saved = load_file(folder / "batch.safetensors")
        for at, micro in enumerate(map(common.shifted, batch)):
            for key, value in micro.items():
                assert torch.equal(saved[f"m{at}.{key}"], value), (at, key)
        assert len(saved) == 3 * len(batch)
        print(f"megatron: a step of {len(batch)} micro-batches was saved as it was used")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(rank, pathlib.Path(folder))
