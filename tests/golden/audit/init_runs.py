"""Sound steps whose folders say all or most of how they were made, for `fsdp audit --init`. See README.md.

Schedules are those of the frameworks and move on before a state is saved, as the documentation of each has it.
"""

import os
import shutil
import sys

import torch

import common
import snippets
from make_fixtures.common import run_ranks


def trainer(folder):
    """Only the defaults of transformers' TrainingArguments: fused AdamW, no decay, a linear schedule, clipping to a norm of 1."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from trainer_runs import KEPT, Rows

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == common.SAVED_AFTER + 1

    class Audited(Trainer):
        def get_batch_samples(self, *arguments):
            micro_batches, count = super().get_batch_samples(*arguments)
            if self.state.global_step == common.SAVED_AFTER:
                snippets.save_batch(folder / "batch.safetensors", micro_batches)
            return micro_batches, count

    os.chdir(folder)  # the folder of a run is saved, so it is relative
    own = dict(per_device_train_batch_size=common.ROWS, gradient_accumulation_steps=common.MICRO_ALL)
    quiet = dict(use_cpu=True, report_to=[], disable_tqdm=True, save_steps=1, remove_unused_columns=False)
    arguments = TrainingArguments(output_dir="work", **own, **quiet)
    arguments.__dict__["_setup_devices"] = torch.device("cpu")
    trained = Audited(model=common.model("qwen2-tied"), args=arguments, train_dataset=Rows("padded", None))
    trained.add_callback(Stop())
    trained.train()
    for name, step in {"before": common.SAVED_AFTER, "after": common.SAVED_AFTER + 1}.items():
        saved = folder / "work" / f"checkpoint-{step}"
        (folder / name).mkdir()
        for kept in KEPT:
            if (saved / kept).exists():
                shutil.copy(saved / kept, folder / name / kept)
    shutil.rmtree("work")


def accelerate(folder):
    """`save_state` with the schedule of the loop, which only the loop knows."""
    from accelerate import Accelerator
    from transformers import get_inverse_sqrt_schedule

    from accelerate_runs import correct
    from fsdp2 import targets

    accelerator = Accelerator(cpu=True)
    model = common.model("llama")
    optimizer = torch.optim.AdamW(common.groups(model.named_parameters()), lr=common.LR, betas=common.BETAS, eps=common.EPS)
    schedule = get_inverse_sqrt_schedule(optimizer, common.WARMUP)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for at in range(common.SAVED_AFTER + 1):
        batch = common.padded(100 + at)
        total = sum(map(targets, batch)) * common.MICRO * common.RANKS  # as `correct` counts
        for micro in batch:
            accelerator.backward(correct(model, micro, total))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if at == common.SAVED_AFTER:
            snippets.save_batch(folder / "batch.safetensors", batch)
        name = {common.SAVED_AFTER - 1: "before", common.SAVED_AFTER: "after"}.get(at)
        if name:
            accelerator.save_state(folder / name)
    for file in folder.rglob("random_states_*.pkl"):
        file.unlink()


def deepspeed(folder):
    """An optimizer and a schedule of DeepSpeed's own configuration, with clipping; ZeRO-2 on two ranks in bfloat16."""
    run_ranks(deepspeed_rank, folder)


def deepspeed_rank(rank, folder):
    import deepspeed
    import deepspeed.ops

    from accelerate_runs import correct
    from deepspeed_runs import save
    from fsdp2 import targets

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise DeepSpeed compiles it first
    deepspeed.init_distributed("gloo")
    schedule = {"warmup_min_lr": 0.0, "warmup_max_lr": common.LR, "warmup_num_steps": 10, "total_num_steps": common.STEPS}
    optimizer = {"lr": common.LR, "betas": common.BETAS, "eps": common.EPS, "weight_decay": common.DECAY, "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": common.ROWS,
        "gradient_accumulation_steps": common.MICRO,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "AdamW", "params": optimizer},
        "scheduler": {"type": "WarmupDecayLR", "params": schedule},
        "zero_optimization": {"stage": 2},
        "zero_force_ds_cpu_optimizer": False,
    }
    model = common.model("llama")
    parameters = [parameter for parameter in model.parameters()]
    engine = deepspeed.initialize(model=model, model_parameters=parameters, config=config, dist_init_required=False)[0]
    for at in range(common.SAVED_AFTER + 1):
        batch = common.padded(100 + at)
        mine = batch[rank * common.MICRO : (rank + 1) * common.MICRO]
        for micro in mine:
            engine.backward(correct(engine, micro, sum(map(targets, batch))))
            engine.step()
        if at == common.SAVED_AFTER:
            snippets.save_batch(folder / "batch.safetensors", mine)
        name = {common.SAVED_AFTER - 1: "before", common.SAVED_AFTER: "after"}.get(at)
        if name:
            save(engine, folder / name, rank)


FAMILIES = {"trainer": "qwen2-tied"}

if __name__ == "__main__":
    for make in (trainer, accelerate, deepspeed):
        if not sys.argv[1:] or make.__name__ in sys.argv[1:]:
            folder = common.fresh("init", make.__name__)
            common.config(FAMILIES.get(make.__name__, "llama")).save_pretrained(folder)
            make(folder)
