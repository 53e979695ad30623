#!/usr/bin/env bash
# Publishes the wheels of a folder on PyPI, which trusts the workflow that this runs in; elsewhere, UV_PUBLISH_TOKEN says who you are.
#
# usage: scripts/publish_wheels.sh FOLDER [--dry-run]
set -euo pipefail
folder=${1:?usage: scripts/publish_wheels.sh FOLDER [--dry-run]}
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
python3 -m venv "$tools"
"$tools/bin/pip" install --quiet uv==0.13.9
# `fsdp-cuda` needs the `fsdp` of its version.
"$tools/bin/uv" publish "${@:2}" "$folder"/fsdp-*.whl
"$tools/bin/uv" publish "${@:2}" "$folder"/fsdp_cuda-*.whl
