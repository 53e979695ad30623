#!/usr/bin/env bash
# Lists every crate that the binaries of a release are made of, as FOLDER/fsdp-VERSION.cdx.json (CycloneDX): those needed at run
# time as `required`, those of builds as `excluded`. Some are of other systems: cargo-cyclonedx knows one target, or all.
#
# usage: scripts/sbom.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: scripts/sbom.sh FOLDER}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
command -v cargo-cyclonedx >/dev/null || cargo install --quiet --locked cargo-cyclonedx@0.5.9
# Same content, same bytes.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
# It writes beside each manifest.
trap 'find crates tests -maxdepth 2 -name "fsdp-$version.cdx.json" -delete' EXIT
cargo cyclonedx --quiet --format json --spec-version 1.5 --features cuda,object-store,xla --target all \
  --manifest-path crates/fsdp-cli/Cargo.toml --override-filename "fsdp-$version.cdx"
# Its references to crates of the repository have the path of the checkout.
sed "s|path+file://$PWD/|path+file:///|g" "crates/fsdp-cli/fsdp-$version.cdx.json" >"$folder/fsdp-$version.cdx.json"
