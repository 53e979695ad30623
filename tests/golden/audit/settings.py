"""Which models are trained by FSDP2, and which errors are planted in each."""

from dataclasses import dataclass, field

import torch

import common
import faults
from faults import Fault


@dataclass
class Setting:
    name: str
    family: str
    cases: dict
    bf16: bool = False
    dcp: tuple = ("before", "sound")  # what is saved by DCP; the rest in one file
    changes: dict = field(default_factory=dict)

    def model(self, **changes):
        return common.model(self.family, **(self.changes | changes))

    def layout(self, case):
        return "dcp" if case in self.dcp else "file"

    def files(self, folder):
        """Configuration and run files."""
        common.config(self.family, **self.changes).save_pretrained(folder)
        dtype = 'param_dtype = "bf16"\n' if self.bf16 else ""
        common.write_run(folder, self.family, dtype=dtype)
        if any(fault.run == "run-clip.toml" for fault in self.cases.values()):
            common.write_run(folder, self.family, clip=CLIP, dtype=dtype)
            (folder / "run.toml").rename(folder / "run-clip.toml")
            common.write_run(folder, self.family, dtype=dtype)


CLIP = 0.5
FIRST = {
    "sound": Fault(),
    "scaled-all-2": Fault("gradient_scaled", ".", 2.0, gradients=faults.scaled(".", 2.0)),
    "missing-layer-1": Fault("gradient_missing", r"layers\.1\.", 0.0, gradients=faults.zeroed(r"layers\.1\.")),
    "mean-of-micro-batches": Fault("loss_mean_of_means", mean="micro"),
    "prompts-counted": Fault("tokens_counted", batch=faults.prompts_counted),
    "rate-one-step-late": Fault("learning_rate", factor=common.rate(5) / common.rate(6), late=1),
    "decay-half": Fault("weight_decay", factor=0.5, optimizer={"decay": common.DECAY / 2}),
}

SETTINGS = [
    Setting("fsdp2-llama", "llama", FIRST),
]
