#!/usr/bin/env bash
# Packages all crates as for crates.io, unpacks them in an empty folder, builds them there from each other, and runs the
# library's example: what is published must not need this repository.
#
# usage: scripts/package_crates.sh [FOLDER for the .crate files]
set -euo pipefail
cd "$(dirname "$0")/.."

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# One crate's package needs the others in a registry only to be verified, which is done here for all at once.
CARGO_TARGET_DIR="$out" cargo package --workspace --exclude fsdp-tests --exclude fsdp-published --exclude fsdp-gpu-bench --no-verify --quiet ${CI:+--locked}
[ -z "${1:-}" ] || cp "$out"/package/*.crate "$1"

mkdir "$out/unpacked"
for crate in "$out"/package/*.crate; do
  tar -xzf "$crate" -C "$out/unpacked"
done
# Versions that were tested.
cp Cargo.lock "$out/unpacked"
cd "$out/unpacked"
{
  printf '[workspace]\nresolver = "3"\nmembers = ["fsdp*"]\n\n[patch.crates-io]\n'
  for folder in fsdp*; do
    printf '%s = { path = "%s" }\n' "${folder%-*}" "$folder"
  done
} >Cargo.toml
packages=(fsdp*)
echo "building ${#packages[@]} packages"
export CARGO_TARGET_DIR="${PACKAGES_TARGET_DIR:-$out/target}"
cargo check --workspace --features fsdp-cli/object-store,fsdp-cli/xla --quiet
cargo run -p fsdp --example own_model --quiet
