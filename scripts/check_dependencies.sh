#!/usr/bin/env bash
# Checks the licenses of all dependencies, known advisories, duplicates and sources (deny.toml), and, once a version is on crates.io,
# that the interface of the crate `fsdp` changes only as its version allows. Needs the network, and builds its tools if they
# are not there.
set -euo pipefail
cd "$(dirname "$0")/.."
tool() {
  command -v "cargo-$1" >/dev/null || cargo install --quiet --locked "cargo-$1@$2"
}

tool deny 0.20.2
cargo deny --locked check

if published=$(cargo info fsdp --registry crates-io 2>&1); then
  tool semver-checks 0.51.0
  cargo semver-checks --package fsdp
elif grep -q 'could not find .fsdp. in registry' <<<"$published"; then
  echo "interface not compared: no version of fsdp is on crates.io"
else
  echo "$published" >&2
  exit 1
fi
