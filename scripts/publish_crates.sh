#!/usr/bin/env bash
# Publishes all crates on crates.io, each after those that it needs. scripts/package_crates.sh has built them from each other,
# so they are not built again. CARGO_REGISTRY_TOKEN says who you are.
#
# usage: scripts/publish_crates.sh [--dry-run]
set -euo pipefail
cd "$(dirname "$0")/.."
cargo publish --workspace --exclude fsdp-tests --locked --no-verify "$@"
