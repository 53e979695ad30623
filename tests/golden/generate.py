"""Write the golden files of this folder from PyTorch and transformers.

usage: python generate.py [--out FOLDER]      (torch 2.11.0, transformers 5.17.0, safetensors, numpy)

What every file and tensor is: README.md. Models: cases.py. One thread, CPU, no network. The same
machine writes the same bytes twice; another processor may round float32 results differently in the
last bits, so committed files are replaced only on purpose.

Float32 values are what PyTorch computes in float32, not a rounding of something better. Names that end
in 64 are the same mathematics in float64, from the same (float32) parameters, and tell PyTorch's own
rounding from a mistake of ours; `bands.json` holds the distance between the two.
"""

import argparse
import copy
import json
import os

import safetensors
import torch
import torch.nn.functional as F
import transformers
from cases import ADAMW_EPS, BATCH, CASES, SEQ, VOCAB
from safetensors.torch import save_file
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    masking_utils,
)
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3
from transformers.optimization import Adafactor, get_linear_schedule_with_warmup
from transformers.pytorch_utils import Conv1D

STEPS = 3


# Models


def write_model(folder, name):
    """Write config.json and model.safetensors of a case, with every parameter drawn from its seed."""
    model_type, arguments, rope_theta, seed = CASES[name]
    if model_type == "llama":
        rope = dict(rope_type="default", rope_theta=rope_theta)
        model = LlamaForCausalLM(LlamaConfig(**arguments, rope_parameters=rope))
    else:
        model = GPT2LMHeadModel(GPT2Config(**arguments))
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        # Wider than a real initialization, and nothing left at 0 or 1: gradients of a useful size, and
        # a forgotten bias or norm weight shows.
        is_norm_weight = parameter.ndim == 1 and parameter_name.endswith(".weight")
        noise = 0.2 * torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(noise + 1.0 if is_norm_weight else noise)
    model.save_pretrained(folder)
    if os.path.exists(f"{folder}/generation_config.json"):
        os.remove(f"{folder}/generation_config.json")
    ids = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    return model, ids


def load_and_check(folder, written):
    """Load the folder as a user would and compare it with the model that was written."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    with safetensors.safe_open(f"{folder}/model.safetensors", "pt") as file:
        stored = set(file.keys())
    assert stored == {name for name, _ in model.named_parameters()}, "one entry per parameter"
    for (name, a), (other, b) in zip(model.named_parameters(), written.named_parameters(), strict=True):
        assert name == other and torch.equal(a, b), name
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings
    assert ("lm_head.weight" in stored) == (not tied), "a tied weight is stored once"
    return model


def to_double(model):
    """A float64 copy. Llama's RMSNorm and rotary tables, fixed to float32 upstream, are replaced."""
    model = copy.deepcopy(model).double()

    def rms_norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self, x, position_ids):
        base, dim = self.config.rope_parameters["rope_theta"], self.config.head_dim
        cos, sin = rope_tables(base, dim, position_ids[0])
        return cos[None], sin[None]

    for module in model.modules():
        if isinstance(module, modeling_llama.LlamaRMSNorm):
            module.forward = rms_norm.__get__(module)
        elif isinstance(module, modeling_llama.LlamaRotaryEmbedding):
            module.forward = rotary.__get__(module)
    return model


def loss_of(model, ids):
    """Logits, and the mean cross-entropy over all targets (the ids, shifted by one)."""
    logits = model(ids[:, :-1], use_cache=False).logits
    return logits, F.cross_entropy(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


def train(model, ids, make_optimizer, max_norm=None):
    """Three steps on one batch: parameters after, loss before each step, gradient norms before clipping."""
    model = copy.deepcopy(model) if model.dtype == torch.float32 else to_double(model)
    optimizer = make_optimizer(model.parameters())
    losses, norms = [], []
    for _ in range(STEPS):
        _, loss = loss_of(model, ids)
        loss.backward()
        losses.append(loss.detach())
        if max_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return parameters, torch.stack(losses), torch.stack(norms) if norms else None


def adamw(eps):
    return lambda parameters: torch.optim.AdamW(
        parameters, lr=1e-2, betas=(0.9, 0.95), eps=eps, weight_decay=0.1, foreach=False, fused=False
    )


RUNS = {  # prefix -> (optimizer, clipping norm)
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, foreach=False, fused=False), None),
    "adamw3": (adamw(ADAMW_EPS["adamw3"]), 1.0),
    "adamw8": (adamw(ADAMW_EPS["adamw8"]), 1.0),
    "adafactor": (lambda p: Adafactor(p, lr=1e-2, relative_step=False, scale_parameter=False), None),
    "adafactor_rel": (
        lambda p: Adafactor(p, lr=None, relative_step=True, scale_parameter=True, warmup_init=False),
        None,
    ),
}


def expected(model, ids):
    """Everything measured on one model in its own dtype, under the names of expected.safetensors."""
    out = {}
    logits, loss = loss_of(model, ids)
    loss.backward()
    out["logits"], out["loss"] = logits.detach(), loss.detach()
    for name, parameter in model.named_parameters():
        out[f"grad.{name}"] = parameter.grad.clone()
        parameter.grad = None
    for run, (make_optimizer, max_norm) in RUNS.items():
        parameters, losses, norms = train(model, ids, make_optimizer, max_norm)
        out |= {f"{run}.{name}": value for name, value in parameters.items()}
        out[f"losses_{run}"] = losses
        if norms is not None:
            out["grad_norms" if run == "adamw3" else f"grad_norms_{run}"] = norms
    return out


def bands(single, double):
    """Per group: the largest |float32 - float64| relative to the tensor's largest value, and where.

    The key bias of GPT-2 has a gradient of exactly zero (softmax ignores a shift of its row), so
    float32 holds noise there, which an optimizer that normalizes turns into steps of full size.
    That third of `c_attn.bias` is listed by itself.
    """
    out = {}

    def enter(group, name, a, b):
        largest = b.abs().max().item()
        difference = (a.double() - b).abs().max().item() / largest
        entry = out.setdefault(group, {"band": -1.0, "tensor": ""})
        if difference > entry["band"]:
            out[group] = {"band": float(f"{difference:.3g}"), "tensor": name}

    for name, a in single.items():
        group, b = name.split(".")[0], double[name]
        if name.endswith("c_attn.bias"):
            (query, key, value), (query64, key64, value64) = a.chunk(3), b.chunk(3)
            enter(group, name, torch.cat([query, value]), torch.cat([query64, value64]))
            if group != "grad":
                enter(f"{group} (key bias)", name, key, key64)
        else:
            enter(group, name, a, b)
    return out


def model_goldens(out_folder):
    all_bands = {}
    for name in CASES:
        folder = f"{out_folder}/{name}"
        os.makedirs(folder, exist_ok=True)
        written, ids = write_model(folder, name)
        model = load_and_check(folder, written)
        single = expected(model, ids)
        double = expected(to_double(model), ids)
        all_bands[name] = bands(single, double)
        tensors = {"ids": ids, "loss64": double["loss"]} | single
        tensors |= {k.replace("grad.", "grad64.", 1): v for k, v in double.items() if k.startswith("grad.")}
        write_tensors(f"{folder}/expected.safetensors", tensors)
        norms = [f"{x:.3f}" for x in single["grad_norms"]]
        print(f"{name}: {model.num_parameters()} parameters, loss {single['loss']:.4f}, gradient norms {norms}")
        for group, entry in all_bands[name].items():
            print(f"    {group:26} {entry['band']:.1e}  {entry['tensor']}")
    write_json(f"{out_folder}/bands.json", all_bands)


# Operations, in float64


def rope_tables(base, dim, positions):
    """cos and sin, each (positions, dim), the second half a copy of the first (Hugging Face)."""
    inverse = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(positions.double(), torch.cat((inverse, inverse)))
    return angles.cos(), angles.sin()


class Ops:
    """Collects `<case>.<tensor>`; gradients are of sum(y * dy) with a random dy."""

    def __init__(self):
        self.tensors, self.generator = {}, torch.Generator().manual_seed(7)

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def add(self, case, function, inputs, constants=None):
        """`inputs` get gradients, `constants` are stored only."""
        inputs = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        y = function(**inputs)
        dy = self.draw(*y.shape) if y.ndim else torch.ones((), dtype=torch.float64)
        gradients = torch.autograd.grad(y, list(inputs.values()), dy)
        entry = {name: x.detach() for name, x in inputs.items()} | {"y": y.detach(), "dy": dy}
        entry |= {f"d{name}": g for name, g in zip(inputs, gradients, strict=True)}
        for name, value in (constants or {}).items():
            is_tensor = isinstance(value, torch.Tensor)
            entry[name] = value if is_tensor else torch.tensor(value, dtype=torch.float64)
        self.tensors |= {f"{case}.{name}": value for name, value in entry.items()}


def norm_ops(ops):
    for case, shape, eps in (("rms_norm", (3, 5, 8), 1e-5), ("rms_norm_odd", (7, 13), 1e-6)):
        norm = lambda x, weight, eps=eps: F.rms_norm(x, shape[-1:], weight, eps)
        ops.add(case, norm, dict(x=ops.draw(*shape), weight=1 + ops.draw(shape[-1])), dict(eps=eps))
    for case, shape, eps in (("layer_norm", (3, 5, 8), 1e-5), ("layer_norm_odd", (7, 13), 1e-6)):
        norm = lambda x, weight, bias, eps=eps: F.layer_norm(x, shape[-1:], weight, bias, eps)
        inputs = dict(x=2 + ops.draw(*shape), weight=1 + ops.draw(shape[-1]), bias=ops.draw(shape[-1]))
        ops.add(case, norm, inputs, dict(eps=eps))
    # Rows of nearly equal values: the variance is far below epsilon.
    x = 3 + 1e-4 * ops.draw(4, 6)
    flat = lambda x, weight, bias: F.layer_norm(x, (6,), weight, bias, 1e-5)
    ops.add("layer_norm_flat", flat, dict(x=x, weight=ops.draw(6), bias=ops.draw(6)), dict(eps=1e-5))


def attention(q, k, v):
    """Causal attention; tensors are (batch, seq, heads, head_dim), key/value head = head // (heads/kv)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    y = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    reference = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (y - reference).abs().max() < 1e-12
    return y.transpose(1, 2)


def attention_ops(ops):
    for case, seq, heads, dim, base in (("rope", 7, 3, 6, 1e4), ("rope_500000", 5, 2, 10, 5e5)):
        cos, sin = rope_tables(base, dim, torch.arange(seq))
        rotate = lambda x: modeling_llama.apply_rotary_pos_emb(x, x, cos[None], sin[None], unsqueeze_dim=2)[0]
        ops.add(case, rotate, dict(x=ops.draw(2, seq, heads, dim)), dict(base=base, cos=cos, sin=sin))
    sizes = {  # case -> batch, seq, heads, key/value heads, head_dim, scale of q
        "attention_gqa": (2, 7, 4, 2, 6, 1.0),
        "attention_mha": (1, 9, 3, 3, 5, 1.0),
        "attention_mqa": (2, 5, 4, 1, 8, 1.0),
        "attention_sharp": (1, 6, 2, 1, 4, 100.0),
        "attention_one": (2, 1, 2, 2, 4, 1.0),
    }
    for case, (batch, seq, heads, kv, dim, scale) in sizes.items():
        inputs = dict(q=scale * ops.draw(batch, seq, heads, dim))
        inputs |= dict(k=ops.draw(batch, seq, kv, dim), v=ops.draw(batch, seq, kv, dim))
        ops.add(case, attention, inputs)


def masked_attention(q, k, v, mask, scale):
    """PyTorch's attention with one of transformers' masks: a function of the positions of a query and a key."""
    positions = torch.arange(q.shape[1])
    sees = torch.stack([torch.stack([mask(0, 0, query, key) for key in positions]) for query in positions])
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale, enable_gqa=True)
    return y.transpose(1, 2)


def attention_variant_ops(ops):
    """What other families add to attention: windows, scales, and heads that rotate in part."""
    sizes = {  # case -> batch, seq, heads, key/value heads, head_dim, window, scale, lengths of documents
        "attention_window": (2, 9, 4, 2, 6, 4, None, None),
        "attention_window_two": (1, 5, 2, 1, 4, 2, None, None),
        "attention_scale": (2, 6, 2, 2, 6, None, 0.3, None),
        "attention_documents": (2, 9, 4, 2, 6, None, None, (4, 1, 4)),
        "attention_documents_window": (1, 9, 2, 1, 4, 2, None, (4, 1, 4)),
    }
    for case, (batch, seq, heads, kv, dim, window, scale, documents) in sizes.items():
        mask = masking_utils.causal_mask_function
        if window is not None:
            mask = masking_utils.sliding_window_causal_mask_function(window)
        if documents is not None:
            of_position = torch.repeat_interleave(torch.tensor(documents))[None]
            mask = masking_utils.and_masks(mask, masking_utils.packed_sequence_mask_function(of_position))
        function = lambda q, k, v: masked_attention(q, k, v, mask, scale)
        inputs = dict(q=ops.draw(batch, seq, heads, dim))
        inputs |= dict(k=ops.draw(batch, seq, kv, dim), v=ops.draw(batch, seq, kv, dim))
        ops.add(case, function, inputs)
    # The first 4 of 10 elements rotate, by angles whose sines and cosines have a factor.
    base, factor = 1e3, 1.25
    cos, sin = (factor * table for table in rope_tables(base, 4, torch.arange(7)))
    rotate = lambda x: modeling_phi3.apply_rotary_pos_emb(x, x, cos[None], sin[None], unsqueeze_dim=2)[0]
    ops.add("rope_partial", rotate, dict(x=ops.draw(2, 7, 3, 10)), dict(base=base, factor=factor))


def feed_forward_ops(ops):
    extremes = torch.tensor([-40.0, -8.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 8.0, 40.0], dtype=torch.float64)
    swiglu = lambda gate, up: F.silu(gate) * up
    ops.add("swiglu", swiglu, dict(gate=2 * ops.draw(4, 9), up=ops.draw(4, 9)))
    ops.add("swiglu_extreme", swiglu, dict(gate=extremes, up=ops.draw(9)))
    gelu_new = lambda x: ACT2FN["gelu_new"](x)
    ops.add("gelu_new", gelu_new, dict(x=2 * ops.draw(4, 9)))
    ops.add("gelu_new_extreme", gelu_new, dict(x=extremes))
    ops.add("linear", F.linear, dict(input=ops.draw(2, 3, 5), weight=ops.draw(7, 5), bias=ops.draw(7)))
    ops.add("linear_no_bias", F.linear, dict(input=ops.draw(4, 6), weight=ops.draw(3, 6)))

    def conv1d(input, weight, bias):
        module = Conv1D(weight.shape[1], weight.shape[0]).double()
        return torch.func.functional_call(module, dict(weight=weight, bias=bias), (input,))

    ops.add("conv1d", conv1d, dict(input=ops.draw(2, 3, 5), weight=ops.draw(5, 7), bias=ops.draw(7)))


def token_ops(ops):
    ids = torch.tensor([[0, 3, 3], [10, 1, 3]])  # a repeated id, the first and the last row
    ops.add("embedding", lambda weight: F.embedding(ids, weight), dict(weight=ops.draw(11, 4)), dict(ids=ids))
    everything = torch.tensor([2, 0, 8, 8, 5])
    some_ignored = torch.tensor([2, -100, 0, 8, -100, 5])
    for case, targets, scale in (
        ("cross_entropy", everything, 1.0),
        ("cross_entropy_ignore", some_ignored, 1.0),
        ("cross_entropy_sharp", some_ignored, 300.0),
    ):
        mean = lambda logits: F.cross_entropy(logits, targets, ignore_index=-100)
        inputs = dict(logits=scale * ops.draw(len(targets), 9))
        total = F.cross_entropy(inputs["logits"], targets, ignore_index=-100, reduction="sum")
        count = torch.tensor((targets != -100).sum().item())
        ops.add(case, mean, inputs, dict(targets=targets, sum=total, count=count))


def op_goldens(out_folder):
    ops = Ops()
    norm_ops(ops)
    attention_ops(ops)
    feed_forward_ops(ops)
    token_ops(ops)
    attention_variant_ops(ops)
    write_tensors(f"{out_folder}/ops.safetensors", ops.tensors)


# Learning-rate schedules


def rates(make_scheduler, lr, steps):
    """The learning rate used in each step: scheduler.step() runs between steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=lr)
    scheduler, out = make_scheduler(optimizer), []
    for step in range(steps):
        if step > 0:  # not after the last step: with warmup == steps it would divide by zero
            scheduler.step()
        out.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
    return out


def after_warmup(optimizer, warmup, start_factor, make_rest):
    """LinearLR for `warmup` steps, then the rest; without warmup only the rest, no SequentialLR."""
    if warmup == 0:
        return make_rest(optimizer)
    ramp = LinearLR(optimizer, start_factor=start_factor, total_iters=warmup)
    return SequentialLR(optimizer, [ramp, make_rest(optimizer)], milestones=[warmup])


def schedule_goldens(out_folder):
    settings = [  # steps, warmup, start_factor, lr, min_lr
        (200, 20, 0.1, 3e-3, 0.0),
        (12, 3, 0.1, 1e-2, 0.0),
        (12, 0, 0.1, 1e-2, 0.0),
        (10, 4, 1e-3, 5e-4, 5e-5),
        (7, 1, 0.5, 1.0, 0.25),
        (5, 5, 0.2, 1e-2, 0.0),
        (9, 2, 1.0, 1e-2, 1e-3),
        (1, 0, 0.1, 1e-2, 0.0),
    ]
    out = []
    for steps, warmup, start_factor, lr, min_lr in settings:
        rest = steps - warmup
        constant = lambda o: ConstantLR(o, factor=1.0, total_iters=0)
        cosine = lambda o: CosineAnnealingLR(o, T_max=rest, eta_min=min_lr)
        linear = lambda o: LinearLR(o, start_factor=1.0, end_factor=min_lr / lr, total_iters=rest)
        kinds = {"constant": constant, "warmup-cosine": cosine, "linear": linear}
        for name, kind in kinds.items():
            make = lambda o: after_warmup(o, warmup, start_factor, kind)
            entry = dict(name=name, steps=steps, warmup_steps=warmup, start_factor=start_factor, lr=lr)
            out.append(entry | dict(min_lr=min_lr, lr_per_step=rates(make, lr, steps)))
        # transformers' own linear schedule: warmup from 0, decay to 0.
        make = lambda o: get_linear_schedule_with_warmup(o, warmup, steps)
        entry = dict(name="transformers-linear", steps=steps, warmup_steps=warmup, lr=lr)
        out.append(entry | dict(lr_per_step=rates(make, lr, steps)))
    write_json(f"{out_folder}/lr_schedules.json", out)


# Files


def write_tensors(path, tensors):
    # Only "format": with more keys, safetensors writes them in random order.
    save_file({k: v.clone().contiguous() for k, v in tensors.items()}, path, metadata={"format": "pt"})


def write_json(path, value):
    with open(path, "w") as file:
        file.write(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.path.dirname(os.path.abspath(__file__)))
    out_folder = parser.parse_args().out
    assert torch.__version__.split("+")[0] == "2.11.0", torch.__version__
    assert transformers.__version__ == "5.17.0", transformers.__version__
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model_goldens(out_folder)
    op_goldens(out_folder)
    schedule_goldens(out_folder)
