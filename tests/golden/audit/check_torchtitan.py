"""Runs the example for torchtitan of docs/auditing-reference.md in torchtitan's own `train_step`, and reads the batch that it wrote.

torchtitan 0.3.0 imports names that PyTorch 2.11 does not have, and builds only its own models, so the parts of its trainer that
the step uses are made here: one process, a Llama of transformers.
"""

import tempfile
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import torch.distributed.fsdp
import torch.nn.functional as F
from safetensors.torch import load_file

import common
import snippets

torch.distributed.fsdp.DataParallelMeshDims = object
from torchtitan.trainer import Trainer  # noqa: E402


def shifted(micro):
    """What torchtitan's data loaders give."""
    micro = common.shifted(micro)
    return {"input": micro["input_ids"], "positions": micro["position_ids"]}, micro["labels"]


def main():
    batch = common.packed(common.SAVED_AFTER)
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        saving = {"Trainer": Trainer, "save_batch": lambda _, *rest: snippets.save_batch(file.name, *rest)}
        audited = snippets.run("torchtitan", saving)["Audited"]

        class OneProcess(audited):
            audited_step = 6

            def forward_backward_step(self, *, input_dict, labels, global_valid_tokens):
                logits = self.model_parts[0](input_dict["input"], position_ids=input_dict["positions"]).logits
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / global_valid_tokens
                loss.backward()
                return loss

        trainer = object.__new__(OneProcess)
        model = common.model("llama")
        optimizers = torch.optim.AdamW(model.parameters())
        optimizers.zero_grad = lambda set_to_none: None
        training = SimpleNamespace(disable_cuda_graphs=False, max_norm=1e9)
        trainer.__dict__ |= dict(
            config=SimpleNamespace(training=training),
            optimizers=optimizers,
            lr_schedulers=MagicMock(),
            checkpointer=MagicMock(),
            metrics_processor=MagicMock(should_log=lambda step: False),
            step=7,
            device=torch.device("cpu"),
            model_parts=[model],
            gradient_accumulation_steps=len(batch),
            num_pipeline_parallel_microbatches=1,
            parallel_dims=SimpleNamespace(
                dp_enabled=False, pp_enabled=False, ep_enabled=False, get_optional_mesh=lambda _: None
            ),
        )
        trainer.train_step(map(shifted, batch))
        saved = load_file(file.name)
    for at, (inputs, labels) in enumerate(map(shifted, batch)):
        assert torch.equal(saved[f"m{at}.input_ids"], inputs["input"])
        assert torch.equal(saved[f"m{at}.position_ids"], inputs["positions"])
        assert torch.equal(saved[f"m{at}.labels"], labels)
    assert len(saved) == 3 * len(batch)
    print(f"torchtitan: a step of {len(batch)} micro-batches was saved as it was used")


if __name__ == "__main__":
    main()
