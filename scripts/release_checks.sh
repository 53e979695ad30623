#!/usr/bin/env bash
# Checks that the repository says everywhere that it is this version. With --publish, also that it has an address, which registries
# show; everything can be built and tagged without.
#
# usage: scripts/release_checks.sh VERSION [--publish]
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:?usage: scripts/release_checks.sh VERSION [--publish]}
fail() {
  echo "error: $*" >&2
  exit 1
}

[[ $version =~ ^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)$ ]] || fail "$version is not a version, such as 0.1.0"

# Of the workspace, and of each crate where others need it.
mapfile -t versions < <(sed -n 's/^version = "\(.*\)"/\1/p; s/^fsdp-.*version = "\(.*\)".*/\1/p' Cargo.toml)
for found in "${versions[@]}"; do
  [ "$found" = "$version" ] || fail "Cargo.toml has the version $found instead of $version"
done
for lock in Cargo.lock fuzz/Cargo.lock; do
  mapfile -t versions < <(grep --after-context 1 '^name = "fsdp-*[a-z]*"' "$lock" | sed -n 's/^version = "\(.*\)"/\1/p')
  for found in "${versions[@]}"; do
    [ "$found" = "$version" ] || fail "$lock has the version $found instead of $version: cargo update --workspace, in its folder"
  done
done

grep -Eq "^## \[${version//./\\.}\] - [0-9]{4}-[0-9]{2}-[0-9]{2}\$" CHANGELOG.md ||
  fail "CHANGELOG.md has no heading \"## [$version] - DATE\""
scripts/release_notes.sh "$version" >/dev/null

kept=tests/golden/versions/${version%.*}
compgen -G "$kept/trained/*/expected.json" >/dev/null ||
  fail "$kept has no checkpoints of this version, which later ones must read: tests/golden/README.md says how they are made"

if [ "${2:-}" = --publish ]; then
  grep -Eq '^repository = "https://.+"' Cargo.toml ||
    fail "Cargo.toml has no repository, so nobody could find the source of what is published: set it in [workspace.package], and" \
      "repository.workspace = true in each crate"
fi
