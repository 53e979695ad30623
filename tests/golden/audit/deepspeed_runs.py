"""Steps of DeepSpeed's ZeRO on two ranks, with two micro-batches each. See README.md.

DeepSpeed divides a loss by the micro-batches of a step, averages gradients over ranks, and clips them to a norm of 1 unless it
is told not to.
"""

import deepspeed
import deepspeed.ops
import torch

import common
import snippets
from accelerate_runs import CASES, correct
from fsdp2 import targets
from make_fixtures.common import run_ranks

# Folder -> stage, bfloat16 with float32 master weights, and cases.
SETTINGS = {
    "deepspeed-zero2": (
        2,
        False,
        ("sound", "mean-of-micro-batches", "twice-divided", "decay-coupled", "clipping-by-default"),
    ),
    "deepspeed-zero2-bf16": (2, True, ("sound", "twice-divided")),
    "deepspeed-zero3": (3, False, ("sound", "mean-of-micro-batches", "ranks-forgotten")),
}
CASES = CASES | {
    "decay-coupled": (correct, "padded", dict(cause="weight_decay")),
    "clipping-by-default": (correct, "padded", dict(cause="clipping")),
}


def engine_of(stage, bf16):
    model = common.model("llama")
    groups = common.groups(model.named_parameters())
    config = {
        "train_batch_size": common.ROWS * common.MICRO_ALL,
        "train_micro_batch_size_per_gpu": common.ROWS,
        "gradient_accumulation_steps": common.MICRO,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 1000,
    }
    optimizer = torch.optim.AdamW(groups, lr=common.LR, betas=common.BETAS, eps=common.EPS, foreach=False)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def step(engine, batch, at, loss_of, rank, path=None):
    total = sum(map(targets, batch))
    dataloader = batch[rank * common.MICRO : (rank + 1) * common.MICRO]
    for group in engine.optimizer.param_groups:
        group["lr"] = common.rate(at)
    names = dict(engine=engine, dataloader=dataloader, loss_of=lambda model, micro: loss_of(model, micro, total))
    saving = {"save_batch": lambda _, micros: snippets.save_batch(path, micros), "audited_step": at if path else None}
    snippets.run("deepspeed", names | saving)


def save(engine, folder, rank):
    engine.save_checkpoint(str(folder))
    torch.distributed.barrier()
    if rank == 0:
        for copied in ("zero_to_fp32.py", "zero_to_torch.py"):
            (folder / copied).unlink(missing_ok=True)


def rank(rank, name):
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise DeepSpeed compiles it first
    deepspeed.init_distributed("gloo")
    folder, (stage, bf16, cases) = common.HERE / name, SETTINGS[name]
    engine = engine_of(stage, bf16)
    for at in range(common.SAVED_AFTER):
        step(engine, common.padded(100 + at), at, correct, rank)
    save(engine, folder / "before", rank)
    for case in cases:
        loss_of, data, expected = CASES[case]
        engine = engine_of(stage, bf16)
        engine.load_checkpoint(str(folder / "before"))
        if (
            case == "clipping-by-default"
        ):  # the setting is in the checkpoint, so it does not help to leave it out of the other
            engine.optimizer.clip_grad = 1.0
        for group in engine.optimizer.param_groups:
            group["decoupled_weight_decay"] = case != "decay-coupled"  # torch's Adam is AdamW without it
        batch = common.BATCHES[data](common.SAVED_AFTER)
        step(engine, batch, common.SAVED_AFTER, loss_of, rank, folder / f"{data}.safetensors")
        save(engine, folder / case / "after", rank)
        if rank == 0:
            common.expect_case(folder, case, engine.module, data=data, **expected)


def make(name):
    folder = common.fresh(name)
    common.config("llama").save_pretrained(folder)
    common.write_run(folder / "run.toml", "llama", dtype='param_dtype = "bf16"\n' if SETTINGS[name][1] else "")
    run_ranks(rank, name)
