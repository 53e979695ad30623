#!/usr/bin/env bash
# Tests what is near a change, in the time between two edits: formatting, the unit tests of every crate with a file that differs from
# a revision (tools too), and of its other tests the modules that differ. `cargo test --workspace` tests the rest.
#
# usage: scripts/test_changed.sh [REVISION]     the default is HEAD: what is not committed
set -euo pipefail
cd "$(dirname "$0")/.."

# Packages whose unit tests run; and a package, a binary of tests, and a module in it or nothing, for each other test that runs.
units=() modules=()
while read -r path; do
  IFS=/ read -r top crate kind binary name rest <<<"$path"
  folder=$top/$crate
  [ "$top" != tools ] || crate=fsdp-$crate
  case $path in
  crates/*/tests/*/snapshots/*.snap)
    # BINARY__MODULE__TEST.snap
    name=${rest#"${binary}"__}
    name=${name%%__*}
    ;;
  # BINARY__TEST.snap
  tools/*/tests/snapshots/*.snap) binary=${name%%__*} name= ;;
  crates/*/src/* | crates/*/examples/* | crates/*/Cargo.toml | crates/*/build.rs | tools/*/src/* | tools/*/Cargo.toml | tools/*/build.rs)
    units+=("$crate")
    continue
    ;;
  # It only lists the modules.
  crates/*/tests/*/main.rs) continue ;;
  crates/*/tests/*/*.rs) name=${name%.rs} ;;
  crates/*/tests/*.rs | tools/*/tests/*.rs) binary=${binary%.rs} name= ;;
  tests/tests/*.rs) crate=fsdp-tests binary=tests name=${kind%.rs} ;;
  *) continue ;;
  esac
  # Folders of data have no tests, and tests of devices and libtorch need features.
  if [ "$crate" = fsdp-tests ] || [ -e "$folder/tests/$binary/main.rs" ] || [ -e "$folder/tests/$binary.rs" ]; then
    grep -A 2 "^name = \"$binary\"" "$folder/Cargo.toml" 2>/dev/null | grep -q required-features ||
      modules+=("$crate $binary $name")
  fi
done < <(git diff --name-only --diff-filter=d "${1:-HEAD}" && git ls-files --others --exclude-standard)

cargo fmt --all --check
# The command depends on all crates, and this tool asks for a feature of serde that they do not. With both, all dependencies have
# the features with which `--workspace` builds them, so nothing else is compiled again.
all=(-p fsdp-cli -p fsdp-published) options=()
mapfile -t units < <(printf '%s\n' "${units[@]}" | sort -u | sed '/^$/d')
for crate in "${units[@]}"; do
  if [ "$crate" = fsdp-cli ]; then
    cargo test "${all[@]}" --bin fsdp
  elif [ -e "crates/$crate/src/lib.rs" ]; then
    options+=(-p "$crate")
  else
    cargo test "${all[@]}" -p "$crate" --bin "$crate"
  fi
done
if [ ${#options[@]} -gt 0 ]; then
  cargo test "${all[@]}" "${options[@]}" --lib
fi
printf '%s\n' "${modules[@]}" | sort -u | sed '/^$/d' | while read -r crate binary module; do
  cargo test "${all[@]}" -p "$crate" --test "$binary" -- ${module:+"$module::"}
done
if [ ${#units[@]} -eq 0 ] && [ ${#modules[@]} -eq 0 ]; then
  echo "no file of a crate or its tests has changed"
fi
