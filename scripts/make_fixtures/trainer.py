"""Folders `checkpoint-N` of transformers' Trainer: one process, and FSDP2 on two. Logs of runs with a warm-up: `warm_up/`
in one piece, `resumed/` resumed between two logs."""

import os
import shutil

import common
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments


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


def made(folder, ranks, model=None, **settings):
    os.chdir(folder.parent)
    steps = common.SAVED_AFTER
    defaults = {"max_steps": steps, "save_steps": steps, "logging_steps": 1, "lr_scheduler_type": "constant"}
    arguments = TrainingArguments(
        output_dir=folder.name,  # relative, since it is saved
        use_cpu=True,
        per_device_train_batch_size=common.GLOBAL_BATCH // ranks,
        learning_rate=common.LR,
        adam_beta1=common.BETAS[0],
        adam_beta2=common.BETAS[1],
        adam_epsilon=common.EPS,
        weight_decay=common.DECAY,
        max_grad_norm=common.CLIP,
        optim="adamw_torch",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **{**defaults, **settings},
    )
    return InOrder(model=model or common.llama(), args=arguments, train_dataset=Samples())


def train(folder, ranks, **settings):
    trainer = made(folder, ranks, **settings)
    trainer.train()
    return trainer


# Decayed to zero after a warm-up from zero, and logged as a mean over three steps; all tokens are counted.
WARM_UP = {
    "lr_scheduler_type": "cosine",
    "warmup_steps": 4,
    "logging_steps": 3,
    "include_num_input_tokens_seen": "all",
}


class StopAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == self.step


def log(rank, folder, stopped_after):
    """Keeps nothing of a run but its log."""
    trainer = made(folder, 1, save_steps=5, **WARM_UP)
    if stopped_after is not None:
        trainer.add_callback(StopAfter(stopped_after))
        trainer.train()
        trainer = made(folder, 1, save_steps=5, **WARM_UP)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{stopped_after}")
    else:
        trainer.train()
    shutil.rmtree(folder)
    folder.mkdir()
    trainer.save_state()


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
    for name, stopped_after in [("warm_up", None), ("resumed", 5)]:
        common.run_ranks(log, out / name, stopped_after, ranks=1)


if __name__ == "__main__":
    main()
