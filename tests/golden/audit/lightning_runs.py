"""Steps of PyTorch Lightning: one process that accumulates the gradients of four micro-batches. See README.md.

Lightning divides each loss by the number of micro-batches, so a loss that is a mean gives a mean of means.
"""

import lightning
import torch
from torch.utils.data import DataLoader

import common
import snippets
from accelerate_runs import correct, mean
from fsdp2 import targets

# name -> the loss of a micro-batch, the batch, and what an audit should find
CASES = {
    "sound": (correct, "padded", {}),
    "sound-packed": (correct, "packed", {}),
    "mean-of-micro-batches": (mean, "padded", dict(cause="loss_mean_of_means")),
}


class Module(lightning.LightningModule):
    def __init__(self, loss_of, totals):
        super().__init__()
        self.model = common.model("llama")
        self.loss_of, self.totals = loss_of, totals

    def training_step(self, micro, at):
        step = self.trainer.global_step
        loss_of = self.loss_of if step == common.SAVED_AFTER else correct
        return loss_of(self.model, micro, self.totals[step])

    def configure_optimizers(self):
        groups = common.groups(self.model.named_parameters())
        optimizer = torch.optim.AdamW(groups, lr=common.LR, betas=common.BETAS, eps=common.EPS, foreach=False)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: common.rate(step) / common.LR)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SaveState(lightning.Callback):
    """The states before and after the audited step."""

    def __init__(self, before, after):
        self.paths = {common.SAVED_AFTER: before, common.SAVED_AFTER + 1: after}

    def on_train_batch_end(self, trainer, *_):
        path = self.paths.pop(trainer.global_step, None)
        if path:
            trainer.save_checkpoint(path / "state.ckpt")


def make(name):
    folder = common.fresh(name)
    common.config("llama").save_pretrained(folder)
    common.write_run(folder / "run.toml", "llama")
    for case, (loss_of, data, expected) in CASES.items():
        path = folder / f"{data}.safetensors"
        saving = {"lightning": lightning, "save_batch": lambda _, micros, path=path: snippets.save_batch(path, micros)}
        save_batch = snippets.run("lightning", saving)["SaveBatch"](common.SAVED_AFTER)
        batches = [common.padded(100 + at) for at in range(common.SAVED_AFTER)]
        batches.append(common.BATCHES[data](common.SAVED_AFTER))
        # `correct` is for two ranks with two micro-batches each, whose product is the number of micro-batches here.
        module = Module(loss_of, [sum(map(targets, batch)) for batch in batches])
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=len(batches),
            accumulate_grad_batches=common.MICRO_ALL,
            callbacks=[save_batch, SaveState(folder / "before", folder / case / "after")],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(sum(batches, []), batch_size=None))
        common.expect_case(folder, case, module.model, data=data, **expected)
