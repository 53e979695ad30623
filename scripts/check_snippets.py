#!/usr/bin/env python3
"""Runs the examples of docs/checkpoints.md: a run of `fsdp train` is converted as each says, read as each says, and goes on.

    python scripts/check_snippets.py target/release/fsdp

Needs torch 2.8 or later, transformers and safetensors; accelerate for its example. The run is that of the fixture `fsdp2`,
which PyTorch has made too: losses after step 10 must be those of its `expected.json`, to 1e-6, where the optimizer is read;
else the loss of the next step.
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURE = ROOT / "crates/fsdp-ckpt/tests/fixtures/fsdp2"
sys.path.insert(0, str(ROOT / "scripts/make_fixtures"))

import common  # noqa: E402
import torch  # noqa: E402

SNIPPET = re.compile(r"<!-- snippet: (\w+) -->\n```sh\n(.*?)```\n```python\n(.*?)```", re.S)


def snippets():
    return SNIPPET.findall((ROOT / "docs/checkpoints.md").read_text())


def run(binary, *arguments):
    done = subprocess.run([binary, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"fsdp {' '.join(arguments)}: {done.stderr.strip()[-600:]}")


def checkpoint(binary):
    """Ten steps of `fsdp train`, as PyTorch has done them."""
    data = f'data.train=["{FIXTURE / "tokens.bin"}"]'
    settings = [f'model.path="{FIXTURE}"', data, "train.steps=10", "checkpoint.every=10", 'run.out_dir="run"']
    options = [option for setting in settings for option in ("--set", setting)]
    run(binary, "train", str(FIXTURE / "run.toml"), *options)
    return "run/checkpoints/step-00000010"


def check(name, command, code, binary, source, expected):
    command = command.replace("CHECKPOINT", source).replace("CONFIG", str(FIXTURE / "config.json")).split()
    run(binary, *command[1:])
    model = common.llama(seed=9)
    scope = {"model": model, "optimizer": common.adamw(model)}
    exec(compile(code, name, "exec"), scope)
    has_optimizer = "optimizer" in code
    steps = range(10, 30 if has_optimizer else 11)
    losses, _ = common.train(scope["model"], scope["optimizer"], common.tokens(30), steps)
    apart = max(abs(ours - theirs) for ours, theirs in zip(losses, expected[10:]))
    assert apart <= 1e-6, f"losses are up to {apart} apart"
    return f"{len(losses)} losses, up to {apart:.1e} apart"


def main():
    binary = os.path.abspath(sys.argv[1])
    expected = json.loads((FIXTURE / "expected.json").read_text())["losses"]
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        source = checkpoint(binary)
        for name, command, code in snippets():
            try:
                print(f"ok      {name}: {check(name, command, code, binary, source, expected)}")
            except Exception as error:  # a failed example does not stop the others
                failed.append(name)
                print(f"FAILED  {name}: {error}")
    print(json.dumps({"torch": torch.__version__, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
