"""A `.ckpt` of Lightning: the state dict under the module's attribute, hyperparameters with a class of the user."""

import dataclasses

import common
import lightning
from torch.utils.data import DataLoader
from trainer import Samples


@dataclasses.dataclass
class Settings:
    """A class that a reader does not know."""

    rate: float = common.LR
    layers: int = 1


class Module(lightning.LightningModule):
    def __init__(self, settings):
        super().__init__()
        self.save_hyperparameters()
        self.model = common.llama()

    def training_step(self, batch, _):
        ids = batch["input_ids"]
        return common.loss_of(self.model, ids[:, :-1], ids[:, 1:])

    def configure_optimizers(self):
        optimizer = common.adamw(self)
        return optimizer


def main():
    out = common.fresh("lightning")
    module = Module(Settings())
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=common.SAVED_AFTER,
        gradient_clip_val=common.CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Samples(), batch_size=common.GLOBAL_BATCH))
    trainer.save_checkpoint(out / f"checkpoints/step={common.SAVED_AFTER}.ckpt")
    optimizer = common.by_name(module, trainer.optimizers[0])
    common.expect(out / "expected.safetensors", dict(module.named_parameters()), optimizer)


if __name__ == "__main__":
    main()
