#!/usr/bin/env python3
"""Prints the licenses of all crates that are linked into the command, as they ask for, equal texts once; and those of Rust's
standard library.

usage: python scripts/third_party.py TARGET FEATURE,..
"""
import collections
import html
import json
import pathlib
import re
import subprocess
import sys

NAMES = ("license", "licence", "copying", "copyright", "notice", "unlicense")
RULE = "=" * 100


def linked(metadata):
    """The packages that the command depends on, without those of builds and tests."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    root = metadata["resolve"]["root"]
    found, waiting = {root}, [root]
    while waiting:
        for dependency in nodes[waiting.pop()]["deps"]:
            is_linked = any(kind["kind"] is None for kind in dependency["dep_kinds"])
            if is_linked and dependency["pkg"] not in found:
                found.add(dependency["pkg"])
                waiting.append(dependency["pkg"])
    # Those of this repository have its licenses.
    return [package for package in metadata["packages"] if package["id"] in found and package["source"]]


def texts(package):
    """The texts that come with a package, and with what it contains (zstd's `COPYING` is one that can be chosen instead)."""
    folder = pathlib.Path(package["manifest_path"]).parent
    files = [path for path in sorted(folder.iterdir()) if path.name.lower().startswith(NAMES)]
    files += [path for path in sorted(folder.glob("*/**/*")) if path.name.lower().startswith("license")]
    return [path.read_text(errors="replace").strip() for path in files if path.is_file()]


def standard_library():
    """The notices of the standard library and what it contains, as text: rustup installs them as a page."""
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], check=True, capture_output=True, text=True).stdout.strip()
    page = pathlib.Path(sysroot, "share/doc/rust/COPYRIGHT-library.html").read_text()
    body = page[page.index("<body"):]
    lines = [line.strip() for line in html.unescape(re.sub(r"<[^>]*>", "", body)).splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def main():
    target, features = sys.argv[1:]
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--manifest-path", "crates/fsdp-cli/Cargo.toml"]
    command += ["--filter-platform", target, "--features", features]
    metadata = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    packages = linked(metadata)
    owners, whole = collections.defaultdict(list), {}
    print(f"The command fsdp contains {len(packages)} crates of others, under these licenses:\n")
    for package in sorted(packages, key=lambda package: (package["name"], package["version"])):
        name = f"{package['name']} {package['version']}"
        print(f"{name}: {package['license']}" + (f", {package['repository']}" if package["repository"] else ""))
        for text in texts(package):
            words = " ".join(text.split())
            whole.setdefault(words, text)
            if name not in owners[words]:
                owners[words].append(name)
    for words, names in owners.items():
        print(f"\n{RULE}\n{', '.join(names)}:\n\n{whole[words]}")
    print(f"\n{RULE}\nThe standard library of Rust:\n\n{standard_library()}")


if __name__ == "__main__":
    main()
