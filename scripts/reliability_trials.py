#!/usr/bin/env python3
"""Adversarial trials of `fsdp train` on this machine: kills, full disks, divergence, damage.

    python3 scripts/reliability_trials.py target/release/fsdp [--count 100] [--seed 1] [--only kills,disks]

Each trial draws its case from the seed and checks what docs/reliability.md promises; a failure prints the case. The
standard library is all it needs; full disks need user namespaces (or root) to mount tmpfs.
"""

import argparse
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-05, "initializer_range": 0.02, "tie_word_embeddings": True,
}
RUN = """
model = { path = "model" }
data = { train = ["data.txt"], seq_len = 8 }
train = { steps = 3, micro_batch_size = 2, global_batch_size = 8 }
fsdp = { wrap = ["LlamaDecoderLayer"] }
run = { ranks = 2, out_dir = "out" }
"""
FOREVER = 1_000_000


class Trial:
    """A folder with a tiny model, and what is checked in it."""

    def __init__(self, fsdp, rng):
        self.fsdp, self.rng, self.checks = fsdp, rng, 0
        self.dir = Path(tempfile.mkdtemp(prefix="fsdp-trial-"))
        (self.dir / "model").mkdir()
        (self.dir / "model/config.json").write_text(json.dumps(MODEL))
        (self.dir / "data.txt").write_text("A shard is what one rank keeps of a tensor. Gather it, use it, free it. " * 3)
        (self.dir / "run.toml").write_text(RUN)

    def command(self, *settings, flags=()):
        args = [self.fsdp, "train", "run.toml", *flags]
        for setting in settings:
            args += ["--set", setting]
        return args

    def run(self, args, timeout=120):
        done = subprocess.run(args, cwd=self.dir, capture_output=True, timeout=timeout,
                              env={**os.environ, "TMPDIR": str(self.dir)})
        return done.returncode, done.stdout.decode() + done.stderr.decode()

    def check(self, holds, what):
        self.checks += 1
        if not holds:
            raise AssertionError(what)

    def checkpoints(self, out="out"):
        found = (self.dir / out / "checkpoints").glob("step-*")
        return sorted(path for path in found if path.name[5:].isdigit())

    def check_sound(self, out="out"):
        """Whatever has the name of a checkpoint is one, and nothing under a final name is half-written."""
        for path in self.checkpoints(out):
            code, text = self.run([self.fsdp, "ckpt", "verify", str(path)])
            self.check(code == 0, f"{path}: {text}")
        model = self.dir / out / "model/model.safetensors"
        if model.exists():
            code, text = self.run([self.fsdp, "ckpt", "verify", str(model)])
            self.check(code == 0, f"{model}: {text}")

    def losses(self, out="out"):
        lines = (self.dir / out / "metrics.jsonl").read_text().splitlines()
        # A line without a step lists the participants of the steps after it.
        steps = (line for line in map(json.loads, lines) if "step" in line)
        return [(line["step"], line["loss"], line["grad_norm"]) for line in steps]

    def kill_after(self, args, seconds, sig=signal.SIGKILL):
        with open(self.dir / "told", "w") as told:
            child = subprocess.Popen(args, cwd=self.dir, stdout=told, stderr=told)
            time.sleep(seconds)
            child.send_signal(sig)
            return child.wait(timeout=120)


def kills(trial):
    """A run that is killed again and again ends with the bits of one that never was."""
    rng = trial.rng
    every, keep = rng.choice([1, 2, 7]), rng.choice([0, 1, 2])
    settings = [f"checkpoint.every={every}", f"checkpoint.keep_last={keep}",
                f"checkpoint.async={rng.choice(['true', 'false'])}"]
    for _ in range(rng.randint(2, 4)):
        more = [f"train.steps={FOREVER}", f"run.ranks={rng.choice([1, 2, 4])}"]
        trial.kill_after(trial.command(*settings, *more, flags=["--resume"]), rng.uniform(0.0, 0.4))
        trial.check_sound()
    newest = max([int(path.name[5:]) for path in trial.checkpoints()], default=0)
    steps = newest + rng.randint(1, 5)
    code, text = trial.run(trial.command(*settings, f"train.steps={steps}", flags=["--resume"]))
    trial.check(code == 0, text)
    code, text = trial.run(trial.command(*settings, f"train.steps={steps}", 'run.out_dir="whole"'))
    trial.check(code == 0, text)
    trial.check(trial.losses() == trial.losses("whole"), f"other losses after {steps} steps")
    code, text = trial.run([trial.fsdp, "ckpt", "diff", "out/model/model.safetensors", "whole/model/model.safetensors"])
    trial.check(code == 0, text)


def signals(trial):
    """SIGTERM and SIGINT at any time, also before the first step, leave a state to go on from, or nothing."""
    sig, code = trial.rng.choice([(signal.SIGTERM, 75), (signal.SIGINT, 0)])
    got = trial.kill_after(trial.command(f"train.steps={FOREVER}"), trial.rng.uniform(0.0, 0.3), sig)
    # Until the program has installed its handlers, the default action of the signal applies.
    trial.check(got in (code, 75, 130, -sig), f"exit code {got} after {sig}")
    trial.check_sound()
    newest = max([int(path.name[5:]) for path in trial.checkpoints()], default=0)
    code, text = trial.run(trial.command(f"train.steps={newest + 2}", flags=["--resume"]))
    trial.check(code == 0, text)


def overwrites(trial):
    """--overwrite that is killed, then --resume: never the old run under the new settings."""
    old, new = ['train.optimizer={name="adamw",lr=1e-3}', 'train.optimizer={name="adamw",lr=2e-3}']
    code, text = trial.run(trial.command("train.steps=12", "checkpoint.every=1", "checkpoint.keep_last=0", old))
    trial.check(code == 0, text)
    again = trial.command("train.steps=6", "checkpoint.every=3", new, flags=["--overwrite"])
    trial.kill_after(again, trial.rng.uniform(0.0, 0.06))
    before = trial.checkpoints()
    is_old = [old in json.loads((path / "manifest.json").read_text())["run_state"]["config"] for path in before]
    untouched = len(before) == 12
    trial.check(untouched or len(before) < 3, f"a part of the old checkpoints is left: {before} {is_old}")
    trial.check_sound()
    code, text = trial.run(trial.command("train.steps=12", "checkpoint.every=3", new, flags=["--resume"]))
    trial.check(code == 0 or (code == 2 and "model" in text), text)
    if not untouched and code == 0:
        trial.check("train.optimizer.lr was" not in text, "the old run went on: " + text)


def disks(trial):
    """A disk that fills up, at any time: no step that was done is lost."""
    rng = trial.rng
    (trial.dir / "disk").mkdir()
    kib, every = rng.randint(40, 3000), rng.choice([0, 1, 3, 50])
    settings = [f"train.steps={FOREVER}", f"checkpoint.every={every}", f"checkpoint.async={rng.choice(['true', 'false'])}",
                f"checkpoint.keep_last={rng.choice([0, 1])}", 'run.out_dir="disk/out"']
    train = " ".join(f"'{arg}'" for arg in trial.command(*settings))
    fill = f"sleep {rng.uniform(0.0, 0.4):.3f}; dd if=/dev/zero of=disk/other bs=1k 2>/dev/null;"
    script = (f"mount -t tmpfs -o size={kib}k none disk && {{ {train} >told 2>&1 & {fill} wait $!; echo $? >code; "
              "cp -r disk/out kept 2>/dev/null; true; }")
    (trial.dir / "script").write_text(script)
    code, text = trial.run(["unshare", "--user", "--map-root-user", "--mount", "sh", "script"])
    trial.check(code == 0, f"no tmpfs here: {text}")
    told, code = (trial.dir / "told").read_text(), int((trial.dir / "code").read_text())
    case = f"{kib} KiB, {settings}: exit {code}: {told[-1500:]}"
    trial.check(code == 75, case)
    last = [line for line in told.splitlines() if line.startswith("step")]
    trial.check_sound("kept")
    if last and "the state after step " in told:
        done = int(told.split("the state after step ")[1].split()[0])
        places = [*trial.checkpoints("kept"), *trial.dir.glob("fsdp-state-*/checkpoints/step-*")]
        named = [path for path in places if int(path.name[5:]) == done]
        trial.check(len(named) == 1, f"{done} in {places}: {case}")
        code, text = trial.run([trial.fsdp, "ckpt", "verify", str(named[0])])
        trial.check(code == 0, text)
    else:
        trial.check(not last, f"steps were done and no state is named: {case}")


def divergences(trial):
    """A run that diverges, from the first step or after a sound beginning: what its message says works."""
    rng = trial.rng
    name = rng.choice(["sgd", "adamw", "adafactor"])
    more = ",relative_step=false,scale_parameter=false" if name == "adafactor" else ""
    optimizer = lambda lr: f'train.optimizer={{name="{name}",lr={lr}{more}}}'
    settings = [f"checkpoint.every={rng.randint(1, 3)}", f"checkpoint.keep_last={rng.choice([0, 1, 2])}",
                'train.grad_clip="none"', f"run.ranks={rng.choice([1, 2, 4])}"]
    begin = rng.randint(0, 5)
    if begin:
        code, text = trial.run(trial.command(*settings, f"train.steps={begin}", optimizer("1e-3")))
        trial.check(code == 0, text)
    lr = f"1e{rng.randint(8, 39)}"
    steps = begin + rng.randint(1, 12)
    code, text = trial.run(trial.command(*settings, f"train.steps={steps}", optimizer(lr), flags=["--resume"]))
    trial.check(code in (0, 3), text)
    for path in [*trial.checkpoints(), trial.dir / "out/model/model.safetensors"]:
        files = [path] if path.is_file() else path.glob("*.safetensors")
        trial.check(all(map(is_finite, files)), f"{path} is not finite: lr {lr}, {settings}")
    if code == 3:
        advised = "--resume continues from step" in text
        trial.check(advised or not begin and ": start over" in text, text)
        code, text = trial.run(trial.command(*settings, f"train.steps={steps}", optimizer("1e-3"), flags=["--resume"]))
        trial.check(code == 0, f"lr {lr}, {settings}: {text}")


def is_finite(file):
    with open(file, "rb") as data:
        header = json.loads(data.read(struct.unpack("<Q", data.read(8))[0]))
        values = data.read()
    floats = [info for name, info in header.items() if name != "__metadata__" and info["dtype"] == "F32"]
    words = (word for info in floats for (word,) in struct.iter_unpack("<I", values[slice(*info["data_offsets"])]))
    return all(word >> 23 & 0xFF != 0xFF for word in words)


def damages(trial):
    """Damage to the newest checkpoint is found, and a run goes on from an older one when it is asked to."""
    rng = trial.rng
    settings = ["checkpoint.every=2", "checkpoint.keep_last=0"]
    code, text = trial.run(trial.command(*settings, "train.steps=6"))
    trial.check(code == 0, text)
    newest = trial.checkpoints()[-1]
    file = rng.choice(sorted(newest.iterdir()))
    kind, data = rng.choice(["bit", "cut", "gone", "zeros", "longer"]), bytearray(file.read_bytes())
    at = rng.randrange(len(data))
    if kind == "bit":
        data[at] ^= 1 << rng.randrange(8)
    elif kind == "zeros":
        end = min(len(data), at + rng.randint(1, 500))
        data[at:end] = bytes(b ^ 0xFF for b in data[at:end])
    elif kind == "cut":
        del data[at:]
    elif kind == "longer":
        data += b"\0"
    file.unlink()
    if kind != "gone":
        file.write_bytes(data)
    code, _ = trial.run([trial.fsdp, "ckpt", "verify", str(newest)])
    trial.check(code in (1, 2), f"{kind} at {at} of {file.name} was not found")
    code, text = trial.run(trial.command(*settings, "train.steps=8", flags=["--resume"]))
    trial.check(code == 2 and "step-00000004" in text, f"{kind} at {at} of {file.name}: exit {code}: {text}")
    code, text = trial.run(trial.command(*settings, "train.steps=8", flags=["--resume", "--skip-unsound"]))
    trial.check(code == 0, f"{kind} at {at} of {file.name}: {text}")
    trial.check_sound()
    trial.check([step for step, _, _ in trial.losses()] == list(range(1, 9)), "steps are missing")


KINDS = [kills, signals, overwrites, disks, divergences, damages]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fsdp")
    parser.add_argument("--count", type=int, default=50, help="trials of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="kinds, such as kills,disks")
    options = parser.parse_args()
    failures = 0
    for kind in [kind for kind in KINDS if kind.__name__ in options.only.split(",") or not options.only]:
        checks = failed = 0
        for number in range(options.count):
            case = f"{kind.__name__} {options.seed}:{number}"
            trial = Trial(str(Path(options.fsdp).resolve()), random.Random(case))
            try:
                kind(trial)
            except (AssertionError, subprocess.TimeoutExpired, OSError, ValueError) as error:
                failed += 1
                print(f"FAILED {case}: {error}", flush=True)
            checks += trial.checks
            shutil.rmtree(trial.dir, ignore_errors=True)
        print(f"{kind.__name__}: {options.count} trials, {checks} checks, {failed} failed", flush=True)
        failures += failed
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
