#!/usr/bin/env python3
"""Counts the production lines of the crates: Rust without blank lines, comments and tests.

    python scripts/count_lines.py [REVISION]

Of the files in the checkout, or of those of a revision. Tests are what follows `#[cfg(test)]` (alone, or with features): an item in
braces, or the module's file with all below it; and modules called `conformance` or `testing`, which tests of other
crates call. Attributes count as code.
"""
import collections
import pathlib
import subprocess
import sys

# The crates that run the schedule; their sum measures the redesign of a step.
STEP = ["fsdp-core", "fsdp-nn", "fsdp-cuda", "fsdp-config", "fsdp-data", "fsdp-train", "fsdp-sim", "fsdp-comm"]


def sources(revision):
    """The path and text of every Rust file in a `src` folder of a crate."""
    def git(*args):
        return subprocess.run(["git", *args], check=True, capture_output=True, text=True).stdout
    root = pathlib.Path(git("rev-parse", "--show-toplevel").strip())
    if revision is None:
        paths = sorted(root.glob("crates/*/src/**/*.rs"))
        return {str(path.relative_to(root)): path.read_text() for path in paths}
    names = git("ls-tree", "-r", "--name-only", revision, str(root / "crates")).split()
    names = [name for name in names if "/src/" in name and name.endswith(".rs")]
    return {name: git("show", f"{revision}:{name}") for name in names}


def production(text):
    """The lines of code that are no tests, and the names of the modules that are, in files of their own."""
    lines, tests, skipped, depth = [], [], False, 0
    for line in text.splitlines():
        code = line.split("//")[0].strip()
        if not code:
            continue
        if code.startswith(("#[cfg(test)]", "#[cfg(all(test,")):
            skipped = True
        elif not skipped:
            lines.append(code)
        elif not code.startswith("#["):
            depth += code.count("{") - code.count("}")
            if code.startswith(("mod ", "pub mod ", "pub(crate) mod ")) and code.endswith(";"):
                tests.append(code.split()[-1].rstrip(";"))
            skipped = depth > 0 or not code.endswith((";", "}", ","))
    return lines, tests


def count(revision=None):
    """The production lines of each crate."""
    files = {name: production(text) for name, text in sources(revision).items()}
    skipped = []
    for name, (_, tests) in files.items():
        path = pathlib.PurePosixPath(name)
        folder = path.parent if path.name in ("lib.rs", "main.rs", "mod.rs") else path.with_suffix("")
        skipped += [str(folder / test) for test in tests]
    crates = collections.Counter()
    for name, (lines, _) in files.items():
        is_test = any(name == f"{test}.rs" or name.startswith(f"{test}/") for test in skipped)
        parts = pathlib.PurePosixPath(name).with_suffix("").parts
        if not is_test and not {"conformance", "testing"}.intersection(parts):
            crates[name.split("/")[1]] += len(lines)
    return crates


def main():
    crates = count(*sys.argv[1:2])
    for crate, lines in sorted(crates.items()):
        print(f"{crate:<12} {lines:>6}")
    print(f"{'of a step':<12} {sum(crates[crate] for crate in STEP):>6}")
    print(f"{'all':<12} {sum(crates.values()):>6}")


if __name__ == "__main__":
    main()
