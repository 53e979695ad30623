#!/usr/bin/env bash
# Builds the wheel `fsdp` for Linux with glibc 2.28 or later.
#
# usage: scripts/wheel.sh FOLDER [x86_64 | aarch64]
#
# Needs Rust and Python. The tools (maturin; zig, which links against the old glibc and compiles for the other processor)
# come from PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: scripts/wheel.sh FOLDER [x86_64 | aarch64]}
target=${2:-$(uname -m)}-unknown-linux-gnu

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
python3 -m venv "$tools"
"$tools/bin/pip" install --quiet maturin==1.16.0 cargo-zigbuild==0.24.1 ziglang==0.15.2
PATH="$tools/bin:$PATH"
if ! rustup target list --installed | grep -qx "$target"; then
  rustup target add "$target"
fi

FSDP_COMMIT=$(git rev-parse --short=8 HEAD)
export FSDP_COMMIT
maturin build --zig --target "$target" --compatibility manylinux_2_28 --locked --out "$folder"
