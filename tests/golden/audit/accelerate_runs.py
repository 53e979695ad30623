"""Steps of accelerate on two ranks, as its documentation has them: DDP, and FSDP2 with full states. See README.md."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin

import common
import snippets
from fsdp2 import targets
from make_fixtures.common import allow_fsdp_on_cpu, run_ranks


def correct(model, micro, total):
    """As accelerate's documentation says for batches of different sizes: of all targets of the step."""
    logits = model(**{key: value for key, value in micro.items() if key != "labels"}).logits
    labels = F.pad(micro["labels"][:, 1:], (0, 1), value=-100)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss * common.MICRO * common.RANKS / total


def mean(model, micro, total):
    """As most programs do: the model's own loss."""
    return model(**micro).loss


def without_ranks(model, micro, total):
    """Forgets that gradients are averaged over ranks."""
    return correct(model, micro, total) / common.RANKS


def twice_divided(model, micro, total):
    """Divides by the number of micro-batches, as `accelerator.backward` does already. All have as many targets."""
    return mean(model, micro, total) / common.MICRO


# name -> the loss of a micro-batch, the batch, and what an audit should find
CASES = {
    "sound": (correct, "padded", {}),
    "sound-plain": (mean, "plain", {}),
    "mean-of-micro-batches": (mean, "padded", dict(cause="loss_mean_of_means")),
    "ranks-forgotten": (without_ranks, "padded", dict(cause="gradient_scaled", params=".", factor=1 / common.RANKS)),
    "twice-divided": (twice_divided, "plain", dict(cause="gradient_scaled", params=".", factor=1 / common.MICRO)),
}


def step(accelerator, model, optimizer, batch, at, loss_of, rank, path=None):
    total = sum(map(targets, batch))
    dataloader = batch[rank * common.MICRO : (rank + 1) * common.MICRO]
    for group in optimizer.param_groups:
        group["lr"] = common.rate(at)

    def train_on(micro):
        accelerator.backward(loss_of(model, micro, total))
        optimizer.step()
        optimizer.zero_grad()

    audited = at if path else None
    names = dict(accelerator=accelerator, model=model, dataloader=dataloader, train_on=train_on, step=at)
    saving = {"save_batch": lambda _, micros: snippets.save_batch(path, micros), "audited_step": audited}
    snippets.run("accelerate", names | saving)


def prepared(fsdp):
    plugin = None
    if fsdp:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            state_dict_type="FULL_STATE_DICT",
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        allow_fsdp_on_cpu()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=common.MICRO)
    model = common.model("llama")
    groups = common.groups(model.named_parameters())
    optimizer = torch.optim.AdamW(groups, lr=common.LR, betas=common.BETAS, eps=common.EPS, foreach=False)
    return accelerator, *accelerator.prepare(model, optimizer)


def rank(rank, name):
    folder = common.HERE / name
    accelerator, model, optimizer = prepared("fsdp2" in name)
    for at in range(common.SAVED_AFTER):
        step(accelerator, model, optimizer, common.padded(100 + at), at, correct, rank)
    accelerator.save_state(folder / "before", safe_serialization=True)
    accelerator.wait_for_everyone()
    for case, (loss_of, data, expected) in CASES.items():
        accelerator.load_state(folder / "before")
        batch = common.BATCHES[data](common.SAVED_AFTER)
        step(accelerator, model, optimizer, batch, common.SAVED_AFTER, loss_of, rank, folder / f"{data}.safetensors")
        accelerator.save_state(folder / case / "after", safe_serialization=True)
        if rank == 0:
            common.expect_case(folder, case, accelerator.unwrap_model(model), data=data, **expected)


def make(name):
    folder = common.fresh(name)
    common.config("llama").save_pretrained(folder)
    common.write_run(folder / "run.toml", "llama")
    run_ranks(rank, name)
    for file in folder.rglob("random_states_*.pkl"):
        file.unlink()
