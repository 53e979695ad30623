"""Steps of transformers' Trainer: one process with four micro-batches, or two with two each. See README.md."""

import math
import os
import shutil
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, SequentialSampler
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import common
import snippets
from faults import documents_attend, prompts_counted
from make_fixtures.common import run_ranks


class Rows(Dataset):
    """The rows of `SAVED_AFTER` batches and then those of the audited one."""

    def __init__(self, data, change):
        batches = [common.padded(100 + at) for at in range(common.SAVED_AFTER)]
        last = common.BATCHES[data](common.SAVED_AFTER)
        batches.append([change(micro) for micro in last] if change else last)
        micros = sum(batches, [])
        self.rows = [
            {key: value[row] for key, value in micro.items()} for micro in micros for row in range(common.ROWS)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        return self.rows[row]


class StopAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = control.should_save = state.global_step == self.step


def trainers(path):
    """The classes of the run: the Trainer as docs/auditing.md extends it, and one with a loss of its own."""
    saving = {"Trainer": Trainer, "save_batch": lambda _, micros: snippets.save_batch(path, micros) if path else None}
    audited = snippets.run("trainer", saving)["Audited"]
    audited.audited_step = common.SAVED_AFTER

    class InOrder(audited):
        def _get_train_sampler(self, *_):
            return SequentialSampler(self.train_dataset)

    class MeanOfMicroBatches(InOrder):
        """As all versions before 4.46, and models whose forward takes no `num_items_in_batch`."""

        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            self.model_accepts_loss_kwargs = False

    class OwnLoss(InOrder):
        """Overrides `compute_loss` and forgets `num_items_in_batch`, so nothing divides by the micro-batches."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            out = model(**inputs)
            return (out.loss, out) if return_outputs else out.loss

    return {"right": InOrder, "means": MeanOfMicroBatches, "own": OwnLoss}


@dataclass
class Case:
    trainer: str = "right"
    data: str = "padded"
    change: object = None
    config: dict = field(default_factory=dict)
    arguments: dict = field(default_factory=dict)
    weights: bool = True  # whether the weights of the checkpoint are read before the Trainer does so
    expected: dict = field(default_factory=dict)


ALL = dict(cause="gradient_scaled", params=".", factor=float(common.MICRO_ALL))
LATER = common.COSINE.replace(f"warmup_steps = {common.WARMUP}", "warmup_steps = 5")
LATER_FACTOR = common.rate(6) / (common.LR * 0.5 * (1 + math.cos(math.pi / 15)))
DENSE = {
    "sound": Case(),
    "sound-packed": Case(data="packed"),
    "mean-of-micro-batches": Case("means", expected=dict(cause="loss_mean_of_means")),
    "own-loss": Case("own", "plain", expected=ALL),
    "prompts-counted": Case(change=prompts_counted, expected=dict(cause="tokens_counted")),
    "documents-attend": Case(data="packed", change=documents_attend, expected=dict(cause="documents_attend")),
    "rate-other-warm-up": Case(
        expected=dict(cause="learning_rate", factor=LATER_FACTOR, run="run-warm-up.toml", after="sound")
    ),
}
# The Trainer adds the balancing losses of all micro-batches of a step, where their mean is meant.
ONCE = {"router_aux_loss_coef": common.MIXTURE["router_aux_loss_coef"] / common.MICRO_ALL}
SUMMED = dict(cause="auxiliary_loss", factor=float(common.MICRO_ALL))
# It also resumes without the experts: their names in the file are others, and it reads what fits. So they are read first.
LOST = dict(cause="model_differs", params=r"mlp\.(experts|gate)")
MIXTURE = {
    "sound": Case(data="plain", config=ONCE),
    "auxiliary-summed": Case(data="plain", expected=SUMMED),
    "mean-of-micro-batches": Case("means", expected=dict(cause="loss_mean_of_means")),
    "resumed-without-experts": Case(data="plain", config=ONCE, weights=False, expected=LOST),
}
LORA = {
    "sound": Case(),
    "mean-of-micro-batches": Case("means", expected=dict(cause="loss_mean_of_means")),
    "own-loss": Case("own", "plain", expected=ALL | dict(params="lora")),
}
# Two processes: whether a loss is a mean over the targets of all of them.
LOCAL = Case(arguments={"average_tokens_across_devices": False}, expected=dict(cause="loss_mean_of_means"))
DDP = {"sound": Case(), "mean-of-ranks": LOCAL}
# The class has no ForCausalLM in its name, so the Trainer takes its loss for one that does not shift labels, and divides by the
# number of all labels, those of first tokens too. Where these do not count (prompts), nothing is wrong.
FIRST = dict(cause="gradient_scaled", params=".", factor=(common.SEQ - 1) / common.SEQ)
GPT2 = {"sound": Case(), "first-labels-counted": Case(data="plain", expected=FIRST)}
SETTINGS = {"trainer-llama": ("llama", DENSE), "trainer-mixtral": ("mixtral", MIXTURE), "trainer-lora": ("llama", LORA)}
SETTINGS |= {"trainer-ddp": ("llama", DDP), "trainer-gpt2": ("gpt2", GPT2)}
KEPT = ("model.safetensors", "adapter_model.safetensors", "adapter_config.json", "optimizer.pt", "scheduler.pt")
KEPT += ("trainer_state.json", "training_args.bin", "config.json")


def train(folder, family, case, out, resumed=None, batch=None):
    """One step more than `resumed`, or the run up to the first audited state."""
    adapter = common.LORA if folder.name.endswith("lora") else None
    model = common.model(family, adapter=adapter, **case.config)
    if resumed and not adapter and case.weights:
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(resumed).state_dict())
    arguments = TrainingArguments(
        output_dir="work",
        use_cpu=True,
        per_device_train_batch_size=common.ROWS,
        gradient_accumulation_steps=common.MICRO if dist.is_initialized() else common.MICRO_ALL,
        learning_rate=common.LR,
        lr_scheduler_type="cosine",
        warmup_steps=common.WARMUP,
        max_steps=common.STEPS,
        adam_beta1=common.BETAS[0],
        adam_beta2=common.BETAS[1],
        adam_epsilon=common.EPS,
        weight_decay=common.DECAY,
        max_grad_norm=0.0,
        optim="adamw_torch",
        save_strategy="no",
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **case.arguments,
    )
    arguments.__dict__["_setup_devices"] = torch.device("cpu")  # not "cpu:0", for which torch.load has no rule
    kind = trainers(batch)[case.trainer]
    trainer = kind(model=model, args=arguments, train_dataset=Rows(case.data, case.change))
    last = common.SAVED_AFTER + bool(resumed)
    trainer.add_callback(StopAfter(last))
    trainer.train(resume_from_checkpoint=resumed and str(resumed))
    if trainer.is_world_process_zero():
        out.mkdir(parents=True, exist_ok=True)
        for name in KEPT:
            saved = folder / "work" / f"checkpoint-{last}" / name
            if saved.exists():
                shutil.copy(saved, out / name)
    if dist.is_initialized():
        dist.barrier()
    return model


def make(name):
    family, cases = SETTINGS[name]
    folder = common.fresh(name)
    adapter = common.LORA if name.endswith("lora") else None
    common.config(family).save_pretrained(folder)
    if adapter:
        common.model(family).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
    common.write_run(folder / "run.toml", family, adapter=adapter, init="pretrained" if adapter else "random")
    if name == "trainer-llama":
        common.write_run(folder / "run-warm-up.toml", family, schedule=LATER)
    if name == "trainer-ddp":
        run_ranks(rank, name)
    else:
        rank(0, name)
    shutil.rmtree(folder / "work")


def rank(rank, name):
    family, cases = SETTINGS[name]
    folder = common.HERE / name
    os.chdir(folder)  # the folder of a run is saved, so it is relative
    if name == "trainer-ddp":
        dist.init_process_group("gloo")
    first = next(iter(cases.values()))
    train(folder, family, Case(config=first.config), folder / "before")
    resumed = folder / "work" / f"checkpoint-{common.SAVED_AFTER}"
    for case, what in cases.items():
        batch = None if what.change else folder / f"{what.data}.safetensors"  # the right one
        out = folder / what.expected.get("after", case) / "after"
        model = train(folder, family, what, out, resumed, batch)
        if rank == 0:
            common.expect_case(folder, case, model, data=what.data, **what.expected)
