"""Which models are trained by FSDP2, and which errors are planted in each."""

from dataclasses import dataclass, field

import torch

import common
import faults
from faults import Fault, scaled


@dataclass
class Setting:
    name: str
    family: str
    cases: dict
    bf16: bool = False  # computes in bfloat16 with float32 weights
    pure: bool = False  # has weights and moments in bfloat16
    dcp: tuple = ()  # what is saved by DCP; the rest in one file
    adapter: dict = field(default_factory=dict)

    def model(self, **changes):
        adapter = {key: changes.pop(key) for key in ("alpha",) if key in changes}
        made = common.model(self.family, adapter=self.adapter and self.adapter | adapter, **changes)
        return made.bfloat16() if self.pure else made

    def layout(self, case):
        return "dcp" if case in self.dcp else "file"

    def files(self, folder):
        """Configurations and run files."""
        common.config(self.family).save_pretrained(folder)
        settings = dict(dtype='param_dtype = "bf16"\n' if self.bf16 or self.pure else "", adapter=self.adapter)
        for name in {"run.toml"} | {fault.run for fault in self.cases.values()}:
            clip = CLIP if name == "run-clip.toml" else None
            path = {"run-llama3.toml": "llama3", "run-linear.toml": "linear"}.get(name, ".")
            common.write_run(folder / name, self.family, path=path, clip=clip, **settings)
            if path != ".":
                common.config(path).save_pretrained(folder / path)


CLIP = 0.5
CLIPPED = dict(run="run-clip.toml", clip=CLIP)


def constant(step):
    return common.LR


def late(step):
    return common.rate(step - 1)


FEW = {
    "sound": Fault(),
    "scaled-all-2": Fault("gradient_scaled", ".", 2.0, gradients=scaled(".", 2.0)),
    "missing-layer-1": Fault("gradient_missing", r"layers\.1\.", 0.0, gradients=scaled(r"layers\.1\.", 0.0)),
    "mean-of-micro-batches": Fault("loss_mean_of_means", mean="micro"),
    "prompts-counted": Fault("tokens_counted", batch=faults.prompts_counted),
}
GRADIENTS = {
    "sound-packed": Fault(data="packed"),
    "sound-plain": Fault(data="plain"),
    "sound-shifted": Fault(data="packed", shifted=True),
    "sound-clip": Fault(**CLIPPED),
    "scaled-norms-2": Fault("gradient_scaled", "norm", 2.0, gradients=scaled("norm", 2.0)),
    "scaled-layer-0-4": Fault("gradient_scaled", r"layers\.0\.", 4.0, gradients=scaled(r"layers\.0\.", 4.0)),
    "scaled-head-third": Fault("gradient_scaled", "lm_head", 1 / 3, gradients=scaled("lm_head", 1 / 3)),
    "scaled-rows-of-rank-1": Fault("gradient_scaled", ".", 2.0, gradients=faults.rows_of_rank(1, 2.0)),
    "missing-values": Fault("gradient_missing", "v_proj", 0.0, detach=faults.detach_weight("v_proj$")),
    "missing-layer-0-no-state": Fault("gradient_missing", r"layers\.0\.", 0.0, gradients=faults.none(r"layers\.0\.")),
    "only-last-micro-batch": Fault("gradient_missing", ".", micro=faults.only_last_micro_batch),
    "micro-batch-weighted": Fault("gradient_scaled", factor=1.1, weight=faults.one_more_often),
    "micro-batches-weighted": Fault("gradient_scaled", weight=faults.each_otherwise),
    "micro-batch-missing": Fault("gradient_missing", weight=faults.one_missing),
}
LOSSES = {
    "mean-of-ranks": Fault("loss_mean_of_means", mean="rank"),
    "mean-of-rows": Fault("loss_mean_of_means", mean="row"),
    "padding-counted": Fault("tokens_counted", batch=faults.padding_counted),
    "documents-attend": Fault("documents_attend", data="packed", batch=faults.documents_attend),
    "naive-packing": Fault("documents_attend", data="packed", batch=faults.naive_packing),
    "positions-of-halves": Fault("positions", data="plain", batch=faults.positions_restart_in_the_middle),
    "other-batch": Fault("unexplained", batch=faults.other_tokens),
    "labels-shifted-twice": Fault("tokens_counted", batch=faults.shifted_twice),
}
MODELS = {
    "dropout-active": Fault("dropout_active", config={"attention_dropout": 0.1}),
    "rope-theta": Fault("model_differs", config={"rope_parameters": common.ROPE | {"rope_theta": 10000.0}}),
    "norm-epsilon": Fault("model_differs", config={"rms_norm_eps": 1e-6}),
    "rope-scaling-ignored": Fault("model_differs", run="run-llama3.toml", data="plain"),
    "rope-theta-unusual": Fault("model_differs", config={"rope_parameters": common.ROPE | {"rope_theta": 23000.0}}),
    "rope-linear-factor": Fault(
        "model_differs", run="run-linear.toml", data="plain", config={"rope_parameters": common.LINEAR | {"factor": 8.0}}
    ),
    "rope-yarn": Fault(
        "model_differs", config={"rope_parameters": common.ROPE | {"rope_type": "yarn", "factor": 4.0}}
    ),
    "activation-gelu": Fault("model_differs", config={"hidden_act": "gelu"}),
    "activation-relu": Fault("model_differs", config={"hidden_act": "relu"}),
    "sound-rope-scaling": Fault(run="run-llama3.toml", data="plain", config={"rope_parameters": common.LLAMA3}),
}
UPDATES = {
    "gradients-rounded": Fault("update_rule", gradients=faults.rounded),
    "gradients-rounded-clip": Fault("update_rule", gradients=faults.rounded, **CLIPPED),
    "clipping-missing": Fault("clipping", clipping=faults.clip_none, **CLIPPED),
    "clipping-per-rank": Fault("clipping", clipping=faults.clip_per_rank, **CLIPPED),
    "clipping-per-parameter": Fault("clipping", clipping=faults.clip_per_group, **CLIPPED),
    "clipping-by-largest": Fault("clipping", clipping=faults.clip_by_largest, **CLIPPED),
    "clipping-by-sum": Fault("clipping", clipping=faults.clip_by_sum, **CLIPPED),
    "clipping-of-values": Fault("clipping", clipping=faults.clip_values, clip=0.01),
    "clipping-to-half": Fault("clipping", factor=0.5, run="run-clip.toml", clip=CLIP / 2),
    "clipping-per-unit": Fault("clipping", clipping=faults.clip_per_unit, **CLIPPED),
    "clipping-per-micro-batch": Fault("clipping", micro=faults.clip_what_is_there, clip_after=False, **CLIPPED),
    "clipping-although-none": Fault("clipping", clip=CLIP),
    "scaled-norms-2-clip": Fault("gradient_scaled", "norm", 2.0, gradients=scaled("norm", 2.0), **CLIPPED),
    "mean-of-micro-batches-clip": Fault("loss_mean_of_means", mean="micro", **CLIPPED),
    "rate-one-step-late": Fault("learning_rate", factor=common.rate(5) / common.rate(6), rate=late),
    "rate-without-schedule": Fault("learning_rate", factor=common.LR / common.rate(6), rate=constant),
    "decay-half": Fault("weight_decay", factor=0.5, optimizer={"decay": common.DECAY / 2}),
    "decay-missing": Fault("weight_decay", factor=0.0, optimizer={"decay": 0.0}),
    "decay-of-norms": Fault("weight_decay", "norm", optimizer={"on_all": True}),
    "decay-coupled": Fault("weight_decay", optimizer={"kind": torch.optim.Adam}),
    "betas-of-pytorch": Fault("update_rule", optimizer={"betas": (0.9, 0.999)}),
    "betas-swapped": Fault("update_rule", optimizer={"betas": common.BETAS[::-1]}),
    "no-bias-correction": Fault("update_rule", optimizer={"kind": faults.WithoutCorrection}),
    "epsilon-inside": Fault("update_rule", optimizer={"kind": faults.EpsilonInside}),
    "epsilon-larger": Fault("update_rule", optimizer={"eps": 1e-5}),
}
TWO = {
    "prompts-and-clipping": Fault("tokens_counted", batch=faults.prompts_counted, clip=CLIP, second="clipping"),
    "norms-and-mean-of-micro-batches": Fault(
        "loss_mean_of_means", mean="micro", gradients=scaled("norm", 2.0), second="gradient_scaled"
    ),
    "norms-and-rate": Fault(
        "gradient_scaled", "norm", 2.0, gradients=scaled("norm", 2.0), rate=late, second="learning_rate"
    ),
    "epsilon-and-rate": Fault(
        "update_rule", factor=1000.0, optimizer={"eps": 1e-5}, rate=late, second="learning_rate"
    ),
    "epsilon-inside-and-decay": Fault(
        "update_rule", optimizer={"kind": faults.EpsilonInside, "decay": 0.0}, second="weight_decay"
    ),
}
EXPERTS, ROUTERS = r"mlp\.experts", r"mlp\.gate\."
MIXTURE = {
    "sound": Fault(),
    "sound-plain": Fault(data="plain"),
    "scaled-experts-4": Fault("gradient_scaled", EXPERTS, 4.0, gradients=scaled(EXPERTS, 4.0)),
    "auxiliary-missing": Fault("auxiliary_loss", factor=0.0, auxiliary=0.0),
    "auxiliary-times-4": Fault("auxiliary_loss", factor=4.0, auxiliary=4.0),
    "router-weight-detached": Fault("gradient_missing", ROUTERS, 0.0, gradients=faults.none(ROUTERS)),
    "router-detached": Fault("gradient_missing", ROUTERS, 0.0, detach=faults.detach_routers),
    "mean-of-ranks": Fault("loss_mean_of_means", mean="rank"),
    "scaled-rows-of-rank-1": Fault("gradient_scaled", ".", 2.0, gradients=faults.rows_of_rank(1, 2.0)),
    "clipping-per-rank": Fault("clipping", clipping=faults.clip_per_rank, **CLIPPED),
    "scaled-experts-2-clip": Fault("gradient_scaled", EXPERTS, 2.0, gradients=scaled(EXPERTS, 2.0), **CLIPPED),
    "router-detached-clip": Fault("gradient_missing", ROUTERS, 0.0, detach=faults.detach_routers, **CLIPPED),
}
TIED = {
    "sound": Fault(),
    "sound-packed": Fault(data="packed"),
    "scaled-biases-2": Fault("gradient_scaled", "bias", 2.0, gradients=scaled("bias", 2.0)),
    "tied-without-head": Fault("tied_gradient_missing", "embed", detach=faults.detach_weight("^lm_head$")),
    "tied-without-embedding": Fault("tied_gradient_missing", "embed", detach=faults.detach_weight("embed_tokens$")),
    "documents-attend": Fault("documents_attend", data="packed", batch=faults.documents_attend),
    "rate-one-step-late": Fault("learning_rate", factor=common.rate(5) / common.rate(6), rate=late),
}
POSITIONS = {
    "sound": Fault(),
    "sound-packed": Fault(data="packed"),
    "positions-run-on": Fault("positions", data="packed", batch=faults.positions_run_on),
    "documents-attend": Fault("documents_attend", data="packed", batch=faults.documents_attend),
    "dropout-active": Fault("dropout_active", config={"resid_pdrop": 0.1}),
    "dropout-everywhere": Fault("dropout_active", config={"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}),
}
WINDOW = {
    "sound": Fault(data="plain"),
    "window-other": Fault("model_differs", data="plain", config={"sliding_window": 6}),
    "window-ignored": Fault("model_differs", data="plain", config={"sliding_window": None}),
}
ROPES = common.GEMMA3["rope_parameters"]
KINDS = {
    "sound": Fault(data="plain"),
    "rope-theta-of-windows": Fault(
        "model_differs", data="plain", config={"rope_parameters": ROPES | {"sliding_attention": common.ROPE}}
    ),
    "rope-linear-of-others": Fault(
        "model_differs", data="plain", config={"rope_parameters": ROPES | {"full_attention": common.LINEAR}}
    ),
}
LORA = {
    "sound": Fault(),
    "scaled-a-2": Fault("gradient_scaled", "lora_A", 2.0, gradients=scaled("lora_A", 2.0)),
    "missing-b": Fault("gradient_missing", "lora_B", 0.0, gradients=scaled("lora_B", 0.0)),
    "lora-alpha": Fault("model_differs", factor=2.0, config={"alpha": 2 * common.LORA["alpha"]}),
    "prompts-counted": Fault("tokens_counted", batch=faults.prompts_counted),
}
BF16 = {key: FEW[key] for key in FEW} | {
    "sound-packed": Fault(data="packed"),
    "scaled-norms-2": GRADIENTS["scaled-norms-2"],
    "documents-attend": LOSSES["documents-attend"],
    "decay-half": UPDATES["decay-half"],
}
PURE = {key: FEW[key] for key in ("sound", "scaled-all-2", "missing-layer-1", "prompts-counted")}

MIXTURE_BF16 = {case: MIXTURE[case] for case in ("sound", "scaled-experts-4", "auxiliary-times-4")} | {
    "missing-experts": Fault("gradient_missing", EXPERTS, 0.0, gradients=scaled(EXPERTS, 0.0)),
    "mean-of-micro-batches": FEW["mean-of-micro-batches"],
    "prompts-counted": FEW["prompts-counted"],
}

SETTINGS = [
    Setting("fsdp2-llama", "llama", FEW | GRADIENTS | LOSSES | MODELS | UPDATES | TWO, dcp=("before", "sound")),
    Setting("fsdp2-llama-bf16", "llama", BF16, bf16=True),
    Setting("fsdp2-llama-pure-bf16", "llama", PURE, pure=True),
    Setting("fsdp2-qwen2-tied", "qwen2-tied", TIED),
    Setting("fsdp2-mixtral", "mixtral", MIXTURE),
    Setting("fsdp2-gpt2", "gpt2", POSITIONS),
    Setting("fsdp2-mistral", "mistral", WINDOW),
    Setting("fsdp2-gemma3", "gemma3", KINDS),
    Setting("fsdp2-lora", "llama", LORA, adapter=common.LORA),
    Setting("fsdp2-qwen2-tied-bf16", "qwen2-tied", TIED, bf16=True),
    Setting("fsdp2-mixtral-bf16", "mixtral", MIXTURE_BF16, bf16=True),
    Setting("fsdp2-lora-bf16", "llama", LORA, adapter=common.LORA, bf16=True),
]
