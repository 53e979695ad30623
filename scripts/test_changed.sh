#!/usr/bin/env bash
# Tests what is near a change, in the time between two edits: formatting, the unit tests of every crate with a file that differs from
# a revision, and of its other tests the modules that differ. `cargo test --workspace` tests the rest.
#
# usage: scripts/test_changed.sh [REVISION]     the default is HEAD: what is not committed
set -euo pipefail
cd "$(dirname "$0")/.."

changed=$(git diff --name-only "${1:-HEAD}" && git ls-files --others --exclude-standard)
crates=$(sed -n 's#^crates/\([^/]*\)/\(src/\|Cargo.toml\|build.rs\).*#\1#p' <<<"$changed" | sort -u)
# The package, the binary and the module of each test file.
modules=$(sed -n -e 's#^crates/\([^/]*\)/tests/\([^/]*\)/\([^/.]*\).*#\1 \2 \3#p' -e 's#^tests/\(tests\)/\([^/.]*\)\.rs$#fsdp-\1 \1 \2#p' \
  <<<"$changed" | sort -u)

cargo fmt --all --check
# The command depends on all crates. With it, their dependencies have the features with which `--workspace` builds them, so nothing
# else is compiled again; it has no library itself.
options=()
for crate in $crates; do
  options+=(-p "$crate")
done
if [[ " $crates " == *fsdp-cli* ]]; then
  cargo test -p fsdp-cli --bins
fi
if [ "$(grep -cv '^fsdp-cli$' <<<"$crates")" -gt 0 ] && [ ${#options[@]} -gt 0 ]; then
  cargo test -p fsdp-cli "${options[@]}" --lib
fi
while read -r package binary module; do
  [ -z "$package" ] || cargo test -p fsdp-cli -p "$package" --test "$binary" -- "${module/#main/}"
done <<<"$modules"
if [ -z "$crates$modules" ]; then
  echo "nothing that a test of one crate compiles has changed"
fi
