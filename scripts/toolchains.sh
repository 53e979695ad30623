#!/usr/bin/env bash
# Installs the toolchains that .ci/run needs: the newest stable, and the oldest that is supported (Cargo.toml).
set -euo pipefail
cd "$(dirname "$0")/.."
rustup toolchain install stable --profile minimal --component clippy,rustfmt
rustup default stable
rustup toolchain install "$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)" --profile minimal
