#!/usr/bin/env python3
"""Prints the licenses of all crates that are linked into the command, as they ask for; equal texts once.

usage: python scripts/third_party.py TARGET FEATURE,..
"""
import collections
import json
import pathlib
import subprocess
import sys

NAMES = ("license", "licence", "copying", "copyright", "notice", "unlicense")


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
    """The texts that come with a package."""
    folder = pathlib.Path(package["manifest_path"]).parent
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name.lower().startswith(NAMES)]
    return [path.read_text(errors="replace").strip() for path in files]


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
            owners[words].append(name)
    for words, names in owners.items():
        print(f"\n{'=' * 100}\n{', '.join(names)}:\n\n{whole[words]}")


if __name__ == "__main__":
    main()
