#!/usr/bin/env bash
# Lists every crate that the binaries of a release are made of, as FOLDER/fsdp-VERSION.cdx.json (CycloneDX).
#
# usage: scripts/sbom.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: scripts/sbom.sh FOLDER}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
command -v cargo-cyclonedx >/dev/null || cargo install --quiet --locked cargo-cyclonedx@0.5.9
# It writes beside each manifest.
trap 'find crates tests -maxdepth 2 -name "fsdp-$version.cdx.json" -delete' EXIT
cargo cyclonedx --quiet --format json --spec-version 1.5 --features cuda,object-store,xla --target all \
  --manifest-path crates/fsdp-cli/Cargo.toml --override-filename "fsdp-$version.cdx"
cp "crates/fsdp-cli/fsdp-$version.cdx.json" "$folder"
