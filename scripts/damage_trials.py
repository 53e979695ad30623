#!/usr/bin/env python3
"""Damages copies of the fixtures at random and asks `fsdp ckpt verify` for its verdict.

    python scripts/damage_trials.py target/release/fsdp [TRIALS [SEED]]

Each trial deletes, cuts short, swaps or copies files of a checkpoint, or flips one bit of one of them. What counts is
whether anybody would be harmed: where the verdict is still "sound", `fsdp ckpt diff` compares the damaged copy with the
whole one. A trial ends as one of

    found      the verdict is not "sound", or the checkpoint cannot be opened any more
    harmless   every tensor and value is read as before (two shards that say their place themselves were swapped, say)
    declared   something else is read, and the verdict says that the format cannot show that: the bit lies in bytes that
               the report counts as unprotected, or the report names this loss ("nothing in it would show ..")
    missed     something else is read, and nothing is said

The exit code is 1 if anything was missed.
"""
import collections
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "crates/fsdp-ckpt/tests/fixtures"

# One checkpoint per entry, with `:` and a prefix of file names if a folder holds several.
SETS = [
    "fsdp2/dcp",
    "dcp_2rank",
    "dcp_2rank_zstd",
    "dcp_hsdp_2x2",
    "torchtitan/step-10",
    "megatron/reshardable/iter_0000001",
    "megatron/pipeline/iter_0000001",
    "megatron/ranks/iter_0000001",
    "orbax/ocdbt_zarr2",
    "orbax/ocdbt_zarr3",
    "orbax/files_zarr3",
    "torch_files/tp_fsdp2",
    "torch_files/tp_fsdp2_safetensors",
    "hf_dcp_shards",
    "hf_sharded",
    "torch_files/old_hub/sharded",
    "fsdp2_rank_pth",
    "torch_files/fsdp1_sharded_tensors",
    "torch_files/numbered_shards",
    "verl/actor",
    "xla_fsdp_2rank:trained_rank",
    "accelerate/fsdp2_sharded",
    "accelerate/fsdp2_full",
    "accelerate/ddp",
    "trainer/single/checkpoint-10",
    "trainer/fsdp2/checkpoint-10",
    "deepspeed/zero0",
    "deepspeed/zero1_bf16_tied_frozen",
    "deepspeed/zero2",
    "deepspeed/zero3_bf16_tied_frozen",
    "deepspeed_universal/zero1",
    "deepspeed_universal/zero3_bf16_tied_frozen",
    "lightning/checkpoints",
    "torch_files/pickles:bare.pt",
    "torch_files/pickles/before_1_6",
]
KINDS = ["delete", "truncate", "swap", "copy", "flip", "flip"]


def fsdp(binary, *arguments):
    done = subprocess.run([binary, "ckpt", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode not in (0, 1, 2):
        raise AssertionError(f"fsdp ckpt {arguments}: exit code {done.returncode}\n{done.stderr}")
    return done.returncode, done.stdout


def copy_of(name, to):
    """A copy of a set without what is not part of it; the path to open."""
    folder, _, start = name.partition(":")
    source = FIXTURES / folder
    shutil.copytree(source, to)
    for file in [file for file in to.iterdir() if start and not file.name.startswith(start)]:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    return to


def files_of(folder):
    return sorted(file for file in folder.rglob("*") if file.is_file())


def damage(folder, choose):
    """Does one damage; what it was, the file, and the byte of a flip."""
    kind, files = choose.choice(KINDS), files_of(folder)
    file = choose.choice(files)
    alike = [other for other in files if other.suffix == file.suffix and other != file]
    if kind in ("swap", "copy") and alike:
        other = choose.choice(alike)
        if kind == "copy":
            shutil.copyfile(other, file)
        else:
            contents = file.read_bytes(), other.read_bytes()
            file.write_bytes(contents[1])
            other.write_bytes(contents[0])
        return kind, file, None
    content = bytearray(file.read_bytes())
    if kind == "delete":
        file.unlink()
    elif kind == "truncate":
        file.write_bytes(content[: choose.randrange(len(content))])
    else:
        kind, at = "flip", choose.randrange(len(content))
        content[at] ^= 1 << choose.randrange(8)
        file.write_bytes(content)
        return kind, file, at
    return kind, file, None


def declares(intact, report, folder, kind, file, at):
    """Whether the verdict says that the format cannot show this."""
    if kind == "flip":
        ranges = [entry["ranges"] for entry in intact["unprotected"] if pathlib.Path(entry["path"]) == file]
        return any(start <= at < end for start, end in (ranges[0] if ranges else []))
    if kind == "truncate":
        return False
    return bool(report["cannot_show"])


def outcome(binary, whole, folder, intact, did):
    code, text = fsdp(binary, "verify", folder, "--json")
    if code != 0:
        return "found"
    if fsdp(binary, "diff", whole, folder)[0] == 0:
        return "harmless"
    return "declared" if declares(intact, json.loads(text), folder, *did) else "missed"


def main():
    binary = str(pathlib.Path(sys.argv[1]).resolve())
    trials = int(sys.argv[2]) if len(sys.argv) > 2 else 2800
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    counts, missed = collections.defaultdict(collections.Counter), []
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch).resolve()
        for number, name in enumerate(SETS):
            choose = random.Random(f"{seed} {name}")
            whole, folder = copy_of(name, scratch / f"whole-{number}"), scratch / "damaged"
            shutil.copytree(whole, folder)
            code, text = fsdp(binary, "verify", folder, "--json")
            assert code == 0, f"{name} is not sound: {text}"
            intact = json.loads(text)
            for _ in range(trials // len(SETS)):
                shutil.rmtree(folder)
                shutil.copytree(whole, folder)
                did = damage(folder, choose)
                ended = outcome(binary, whole, folder, intact, did)
                counts[did[0]][ended] += 1
                if ended == "missed":
                    missed.append(f"{name}: {did[0]} {did[1].relative_to(folder)} {did[2] or ''}".rstrip())
            shutil.rmtree(folder)
    kinds = ["found", "harmless", "declared", "missed"]
    print(f"{'damage':10}" + "".join(f"{kind:>10}" for kind in kinds))
    for kind, ended in sorted(counts.items()):
        print(f"{kind:10}" + "".join(f"{ended[one]:>10}" for one in kinds))
    total = sum((ended for ended in counts.values()), collections.Counter())
    print(f"{'all':10}" + "".join(f"{total[one]:>10}" for one in kinds))
    print("\n".join(missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
