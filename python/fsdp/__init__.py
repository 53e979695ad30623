"""Checkpoints and runs of fsdp, from Python.

Each function runs the command ``fsdp``, which is installed beside this module, and returns what it prints with
``--json``. Progress and warnings go to standard error as they do in a terminal.

    >>> import fsdp
    >>> fsdp.convert("run/checkpoint-1000", "model")["tensors"]
    >>> weights = fsdp.load("run/checkpoint-1000")
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Union

if TYPE_CHECKING:
    import torch

__all__ = ["FsdpError", "check", "command", "convert", "inspect", "load", "verify_checkpoint"]

Path = Union[str, "os.PathLike[str]"]


class FsdpError(RuntimeError):
    """The command has failed. The text is its own; `code` is its exit code: 2 where the input is at fault, 75 where
    it is worth trying again."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def command() -> str:
    """The path of the command: where the installation of this module has put it, else beside Python, else on PATH.

    Raises FileNotFoundError if it is in none of these places."""
    packages = pathlib.Path(__file__).absolute().parent.parent
    # `pip install --target` puts commands into `bin` of the packages' folder. Environments, `--user` and `--prefix` have
    # the packages in `lib/python3.x/site-packages` beside `bin`.
    folders = [packages / "bin", *(prefix / "bin" for prefix in list(packages.parents)[2:3])]
    folders.append(pathlib.Path(sysconfig.get_path("scripts")))
    for folder in folders:
        if (folder / "fsdp").is_file():
            return str(folder / "fsdp")
    found = shutil.which("fsdp")
    if found is None:
        places = ", ".join(map(str, folders))
        raise FileNotFoundError(f"there is no command fsdp in {places} or on PATH: pip install fsdp")
    return found


def _run(*arguments: Path) -> dict[str, Any]:
    """Runs the command, and returns the object that it prints; if it prints none, it has failed."""
    line = [command(), *map(os.fspath, arguments), "--json", "--log-format", "json"]
    with tempfile.TemporaryFile() as answer, subprocess.Popen(line, stdout=answer, stderr=subprocess.PIPE) as running:
        try:
            text = _messages(running.stderr)
        except BaseException:
            # What is half written is removed by the command itself.
            running.terminate()
            raise
        code = running.wait()
        answer.seek(0)
        printed = answer.read()
    if not printed:
        raise FsdpError(code, text or f"fsdp ended with code {code} and said nothing")
    return json.loads(printed)


def _messages(lines: Iterable[bytes]) -> str:
    """Shows progress, notes and warnings as they come, and returns the errors."""
    errors = []
    for line in lines:
        try:
            event = json.loads(line)
            level, message = event["level"], event["fields"]["message"]
        except (ValueError, KeyError, TypeError):
            # A panic is text.
            level, message = "ERROR", line.decode(errors="replace").rstrip()
        if level == "ERROR":
            errors.append(message)
        else:
            print(f"warning: {message}" if level == "WARN" else message, file=sys.stderr, flush=True)
    return "\n".join(errors)


def convert(
    source: Path,
    destination: Path,
    *,
    to: Literal["safetensors", "dcp", "native", "torch"] = "safetensors",
    only: Literal["model", "optimizer", "all"] | None = None,
    dtype: Literal["bf16", "f16", "f32"] | None = None,
    world_size: int | None = None,
    options: Iterable[str] = (),
) -> dict[str, Any]:
    """Converts a checkpoint of any format into another one: ``fsdp ckpt convert``, whose `--help` has the formats, and
    more `options`, such as ``["--strip-prefix", "module."]``.

    The destination must not exist; it appears when it is complete, or not at all. Returns what was written (`tensors`,
    `data_bytes`, `files`, `notes`, ..)."""
    named = {"--only": only, "--dtype": dtype, "--world-size": world_size}
    given = [part for name, value in named.items() if value is not None for part in (name, str(value))]
    return _run("ckpt", "convert", source, destination, "--to", to, *given, *options)


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Reads all of a checkpoint: ``fsdp ckpt verify``. Its key `sound` says whether nothing is damaged or missing;
    `problems` lists what is."""
    return _run("ckpt", "verify", path)


def inspect(path: Path, *, tensors: bool = False) -> dict[str, Any]:
    """Format and contents of a checkpoint, from its metadata alone: ``fsdp ckpt inspect``."""
    return _run("ckpt", "inspect", path, *(["--tensors"] if tensors else []))


def check(run_file: Path, *, set: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Checks everything that a run file names, without running it: ``fsdp check``. Its key `findings` has a `verdict`
    for each subject; `set` changes keys, as in ``{"run.ranks": 8}``."""
    changes = [part for key, value in (set or {}).items() for part in ("--set", f"{key}={_toml(value)}")]
    return _run("check", run_file, *changes)


def _toml(value: object) -> str:
    # Strings, numbers, booleans and lists of them are written alike in JSON and TOML.
    return json.dumps(value)


def load(path: Path, *, dtype: Literal["bf16", "f16", "f32"] | None = None) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint of any format, as tensors of torch by name.

    They are converted to a temporary safetensors file and read from it, so there must be room for it (in TMPDIR) and
    for all weights in memory. Needs what `pip install fsdp[torch]` installs."""
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError(f"{error}: fsdp.load needs torch and safetensors (pip install 'fsdp[torch]')") from error

    with tempfile.TemporaryDirectory(prefix="fsdp-") as folder:
        file = pathlib.Path(folder, "model.safetensors")
        convert(path, file, dtype=dtype, options=["--no-sync"])
        return load_file(file)
