#!/usr/bin/env bash
# Builds the static binary `fsdp` for Linux, and packs it with licenses, man pages and completions as
# FOLDER/fsdp-VERSION-TARGET.tar.gz.
#
# usage: scripts/binary.sh FOLDER [x86_64 | aarch64]
#
# It is linked against musl and needs nothing of the system. Nothing can be opened at run time by such a binary, so it
# has no `xla`, and no MPI, NCCL or libtorch either: those are for the wheels and for builds from source.
#
# Needs Rust and Python. The tools (zig, which compiles and links C for musl and for the other processor) come from PyPI.
# Man pages and completions are written by the binary itself; if it cannot run here, they are those of the archive for this
# machine, which has to be in FOLDER then.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "${1:?usage: scripts/binary.sh FOLDER [x86_64 | aarch64]}"
folder=$(realpath "$1")
here=$(uname -m)-unknown-linux-musl
target=${2:-$(uname -m)}-unknown-linux-musl
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
name=fsdp-$version-$target

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# At a place that stays: Cargo builds everything again if the path of the linker is another one.
tools=$(realpath -m "${CARGO_TARGET_DIR:-target}/binary-tools")
python3 -m venv "$tools"
"$tools/bin/pip" install --quiet cargo-zigbuild==0.24.1 ziglang==0.15.2
PATH="$tools/bin:$PATH"
if ! rustup target list --installed | grep -qx "$target"; then
  rustup target add "$target"
fi

FSDP_COMMIT=$(git rev-parse --short=8 HEAD)
export FSDP_COMMIT
cargo zigbuild --profile dist --locked -p fsdp-cli --features object-store --target "$target"
binary=${CARGO_TARGET_DIR:-target}/$target/dist/fsdp
if readelf --program-headers "$binary" | grep -q INTERP; then
  echo "error: $binary is not static" >&2
  exit 1
fi

mkdir "$work/$name"
install -m 755 "$binary" "$work/$name/fsdp"
cp LICENSE-APACHE LICENSE-MIT README.md CHANGELOG.md "$work/$name"
{
  python3 scripts/third_party.py "$target" object-store
  printf '\n%0100d\nmusl:\n\n' 0 | tr 0 =
  cat "$tools"/lib/python3*/site-packages/ziglang/lib/libc/musl/COPYRIGHT
} >"$work/$name/LICENSES-OF-OTHERS"
if [ "$target" = "$here" ]; then
  "$binary" man "$work/$name/man"
  mkdir "$work/$name/completions"
  for shell in bash zsh fish; do
    "$binary" completions "$shell" >"$work/$name/completions/fsdp.$shell"
  done
else
  tar -xzf "$folder/fsdp-$version-$here.tar.gz" -C "$work" --strip-components=1 \
    "fsdp-$version-$here/man" "fsdp-$version-$here/completions"
  mv "$work/man" "$work/completions" "$work/$name"
fi
# The same bytes for the same content, whoever packs it and when.
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(git log -1 --format=%ct)" -C "$work" -c "$name" |
  gzip --no-name --best >"$folder/$name.tar.gz"
echo "$folder/$name.tar.gz"
