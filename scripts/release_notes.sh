#!/usr/bin/env bash
# Prints the section of a version in CHANGELOG.md.
#
# usage: scripts/release_notes.sh VERSION
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:?usage: scripts/release_notes.sh VERSION}
notes=$(awk -v heading="## [$version]" 'index($0, heading) == 1 { on = 1; next } /^## / { on = 0 } on' CHANGELOG.md)
if [ -z "${notes//[[:space:]]/}" ]; then
  echo "error: CHANGELOG.md says nothing about $version" >&2
  exit 1
fi
echo "$notes"
