"""Folders `checkpoint-N` of transformers' Trainer: one process, and FSDP2 on two."""

import os

import common
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainingArguments


class Samples(Dataset):
    """Samples one token longer than a sequence: the model itself shifts the labels."""

    def __init__(self):
        self.ids = common.tokens(common.SAVED_AFTER)

    def __len__(self):
        return common.SAVED_AFTER * common.GLOBAL_BATCH

    def __getitem__(self, row):
        ids = self.ids[row * common.SEQ : row * common.SEQ + common.SEQ + 1].astype("int64")
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(ids)}


class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


def train(folder, ranks, **settings):
    os.chdir(folder.parent)
    arguments = TrainingArguments(
        output_dir=folder.name,  # relative, since it is saved
        use_cpu=True,
        max_steps=common.SAVED_AFTER,
        save_steps=common.SAVED_AFTER,
        logging_steps=1,
        per_device_train_batch_size=common.GLOBAL_BATCH // ranks,
        learning_rate=common.LR,
        lr_scheduler_type="constant",
        adam_beta1=common.BETAS[0],
        adam_beta2=common.BETAS[1],
        adam_epsilon=common.EPS,
        weight_decay=common.DECAY,
        max_grad_norm=common.CLIP,
        optim="adamw_torch",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **settings,
    )
    trainer = InOrder(model=common.llama(), args=arguments, train_dataset=Samples())
    trainer.train()
    return trainer


def one_process(rank, folder):
    trainer = train(folder, 1)
    state = {name: parameter for name, parameter in trainer.model.named_parameters()}
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    common.expect(f"{folder}.expected.safetensors", state, common.by_name(trainer.model, optimizer))


def fsdp(rank, folder):
    config = {
        "version": 2,
        "reshard_after_forward": True,
        "state_dict_type": "SHARDED_STATE_DICT",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "cpu_ram_efficient_loading": False,
    }
    common.allow_fsdp_on_cpu()
    trainer = train(folder, common.RANKS, fsdp=True, fsdp_config=config)
    options = StateDictOptions(full_state_dict=True)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    state, optimizer_state = get_state_dict(trainer.model_wrapped, optimizer, options=options)
    if rank == 0:
        common.expect(f"{folder}.expected.safetensors", state, optimizer_state)


def main():
    out = common.fresh("trainer")
    for name, function, ranks in [("single", one_process, 1), ("fsdp2", fsdp, common.RANKS)]:
        common.run_ranks(function, out / name, ranks=ranks)


if __name__ == "__main__":
    main()
