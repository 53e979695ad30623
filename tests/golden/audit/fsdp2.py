"""Steps of PyTorch's FSDP2 on two ranks over gloo, sound and with an error each. See README.md."""

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import common
import snippets
from faults import Fault
from make_fixtures.common import run_ranks

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def shard(model, bf16):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (common.RANKS,))
    for layer in layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def layers(model):
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner.transformer.h if hasattr(inner, "transformer") else inner.model.layers


def optimizer_of(model, kind=None, decay=common.DECAY, on_all=False, betas=common.BETAS, eps=common.EPS):
    groups = common.groups(model.named_parameters(), decay, on_all)
    kind = kind or torch.optim.AdamW
    return kind(groups, lr=common.LR, betas=betas, eps=eps, foreach=False)


def loss_of(model, micro):
    """The sum of the losses of a micro-batch, the number of its targets, and the balancing loss of its routers."""
    inputs = {key: value for key, value in micro.items() if key != "labels"}
    out = model(**inputs)
    labels = F.pad(micro["labels"][:, 1:], (0, 1), value=-100)
    loss = F.cross_entropy(out.logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, int((labels != -100).sum()), getattr(out, "aux_loss", None)


def targets(micro):
    return int((micro["labels"][:, 1:] != -100).sum())


def backward(model, batch, rank, fault):
    """Gradients of a step. FSDP2 averages over ranks, so a sum over ranks is divided by targets / ranks."""
    if fault.batch:
        batch = [fault.batch(micro) for micro in batch]
    if fault.mean == "row":
        return backward_by_rows(model, batch[rank * common.MICRO : (rank + 1) * common.MICRO])
    mine = batch[rank * common.MICRO : (rank + 1) * common.MICRO]
    counts = {"step": sum(map(targets, batch)) / common.RANKS, "rank": sum(map(targets, mine))}
    coefficient = getattr(model.config, "router_aux_loss_coef", 0.0) * fault.auxiliary
    for at, micro in enumerate(mine):
        loss, count, auxiliary = loss_of(model, micro)
        if auxiliary is not None:
            loss = loss + coefficient * count * auxiliary
        weight = fault.weight(rank, at) if fault.weight else 1.0
        (weight * loss / counts.get(fault.mean, count * common.MICRO)).backward()
        if fault.micro:
            fault.micro(model, at)


def backward_by_rows(model, mine):
    """Of each row the mean, and of all rows of all ranks the mean of these."""
    for micro in mine:
        rows = [{key: value[row : row + 1] for key, value in micro.items()} for row in range(common.ROWS)]
        means = [loss / count for loss, count, _ in (loss_of(model, row) for row in rows)]
        (sum(means) / (common.ROWS * common.MICRO)).backward()


def step(model, optimizer, batch, at, rank, fault):
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if fault.detach:
        fault.detach(model)
    backward(model, batch, rank, fault)
    if fault.gradients:
        for name, parameter in named:
            parameter.grad = fault.gradients(name, parameter.grad, rank)
    if fault.clipping:
        fault.clipping(named, fault.clip)
    elif fault.clip and fault.clip_after:
        torch.nn.utils.clip_grad_norm_(model.parameters(), fault.clip)
    for group in optimizer.param_groups:
        group["lr"] = fault.rate(at)
    optimizer.step()
    optimizer.zero_grad()


def save(model, optimizer, path, layout):
    """All ranks' shards by DCP, or everything in one file of `torch.save`; both are common."""
    if layout == "dcp":
        state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=path)
        return
    state, optimizer_state = get_state_dict(model, optimizer, options=FULL)
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
        torch.save({"model": state, "optimizer": optimizer_state}, path / "state.pt")


def one(rank, setting, case, fault, before):
    """One step from `before`, with the fault."""
    folder = common.HERE / setting.name / case
    model = shard(setting.model(**fault.config), setting.bf16)
    optimizer = optimizer_of(model, **fault.optimizer)
    state, optimizer_state = before
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state, options=FULL)
    for group, fresh in zip(optimizer.param_groups, optimizer_of(model, **fault.optimizer).param_groups):
        group |= {key: value for key, value in fresh.items() if key != "params"}
    batch = common.BATCHES[fault.data](common.SAVED_AFTER)
    mine = batch[rank * common.MICRO : (rank + 1) * common.MICRO]
    data = f"{fault.data}-shifted" if fault.shifted else fault.data
    mine = [common.shifted(micro) for micro in mine] if fault.shifted else mine
    snippets.save_batch(folder.parent / f"{data}.safetensors", mine)
    step(model, optimizer, batch, common.SAVED_AFTER, rank, fault)
    save(model, optimizer, folder / "after", setting.layout(case))
    if rank == 0:
        wrong = dict(cause=fault.cause, params=fault.params, factor=fault.factor)
        wrong |= dict(second=fault.second) if fault.second else {}
        common.expect_case(folder.parent, case, model, data=data, shifted=fault.shifted, run=fault.run, **wrong)


def rank(rank, name):
    """The run up to `before`, on other batches, then one step for each case."""
    from settings import SETTINGS

    setting = {setting.name: setting for setting in SETTINGS}[name]
    dist.init_process_group("gloo")
    model = shard(setting.model(), setting.bf16)
    optimizer = optimizer_of(model)
    for at in range(common.SAVED_AFTER):
        step(model, optimizer, common.padded(100 + at), at, rank, Fault())
    save(model, optimizer, common.HERE / setting.name / "before", setting.layout("before"))
    before = [get_state_dict(model, optimizer, options=FULL)]
    dist.broadcast_object_list(before)  # only the first rank has it whole
    for case, fault in setting.cases.items():
        one(rank, setting, case, fault, copy.deepcopy(before[0]))


def make(setting):
    folder = common.fresh(setting.name)
    setting.files(folder)
    run_ranks(rank, setting.name)
