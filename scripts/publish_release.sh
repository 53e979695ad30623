#!/usr/bin/env bash
# Publishes the folder of a release on GitHub, for the tag that a workflow runs for, with its section of CHANGELOG.md.
#
# usage: scripts/publish_release.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: scripts/publish_release.sh FOLDER}
tag=${GITHUB_REF_NAME:?is set by the workflow}
notes=$(scripts/release_notes.sh "${tag#v}")
gh release create "$tag" --verify-tag --title "fsdp ${tag#v}" --notes-file - "$folder"/* <<<"$notes"
