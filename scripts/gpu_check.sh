#!/usr/bin/env bash
# Checks everything that needs a GPU, meant for ten minutes, and leaves JSON and logs in a folder.
#
#   scripts/gpu_check.sh build DIR       on any machine with libtorch: what is to be run, into DIR
#   scripts/gpu_check.sh run DIR OUT     on a machine with a GPU, from the root of the repository
#
# `build` needs what `cargo build --features cuda` needs (docs/gpu.md). `run` needs the driver and the libraries of the
# wheel torch==2.11.0; PYTHON names an interpreter that has them (default: python3), and with PEER=1 the comparison with
# PyTorch is run too, which takes up to twenty minutes more.
set -euo pipefail

usage() {
  sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
  exit 2
}

build() {
  local dir=$1 executable
  mkdir -p "$dir"
  cargo build --release -p fsdp-cli --features cuda
  cp "${CARGO_TARGET_DIR:-target}/release/fsdp" "$dir/fsdp"
  cargo test --release -p fsdp-cuda --features gpu-tests --test gpu --no-run
  # Said again, now that it is built.
  executable=$(cargo test --release -p fsdp-cuda --features gpu-tests --test gpu --no-run 2>&1 |
    sed -n 's/.*Executable .*(\(.*\))$/\1/p')
  cp "$executable" "$dir/gpu-tests"
  echo "built: $dir/fsdp, $dir/gpu-tests"
}

# Runs one check with a time limit; its output goes to a log, its outcome to the summary.
check() {
  local name=$1 limit=$2 begin code=0
  shift 2
  begin=$(date +%s)
  timeout "$limit" "$@" >"$out/$name.log" 2>&1 || code=$?
  printf '%s\t%s\t%s\n' "$name" "$code" "$(($(date +%s) - begin))" >>"$out/summary.tsv"
  if [ "$code" = 0 ]; then echo "ok       $name"; else echo "FAILED   $name (exit code $code, see $out/$name.log)"; fi
}

run() {
  local dir=$1 fsdp=$1/fsdp python=${PYTHON:-python3} torch
  out=$2
  mkdir -p "$out"
  : >"$out/summary.tsv"
  torch=$("$python" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')
  export LD_LIBRARY_PATH="$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

  check doctor 60 "$fsdp" doctor --json
  check tests 180 "$dir/gpu-tests" --test-threads 1
  on_gpu=(--set 'run.device="cuda"' --set run.share_gpu=true --steps 2)
  for policy in none full selective; do
    check "verify-checkpointing-$policy" 60 "$fsdp" verify examples/quickstart.toml "${on_gpu[@]}" \
      --world-sizes 1,2,4 --set "fsdp.activation_checkpointing=\"$policy\"" --json "$out/verify-$policy.json"
  done
  check verify-bf16 60 "$fsdp" verify examples/quickstart.toml "${on_gpu[@]}" \
    --set 'fsdp.param_dtype="bf16"' --json "$out/verify-bf16.json"
  check verify-offload 60 "$fsdp" verify examples/quickstart.toml "${on_gpu[@]}" \
    --set 'fsdp.offload="cpu"' --json "$out/verify-offload.json"
  check train-nccl 60 "$fsdp" train examples/quickstart.toml --set 'run.device="cuda"' --set run.ranks=1 \
    --set "run.out_dir=\"$out/train\"" --overwrite
  for model in gpt2-124m llama-1.2b; do
    check "bench-$model" 90 "$fsdp" bench gpu --model "$model" --json
  done
  if [ -n "${PEER:-}" ]; then
    check compare 1200 "$python" bench/gpu/compare.py --python "$python" --fsdp "$fsdp" --runs 1 \
      --json "$out/compare.json"
  fi
  "$python" - "$out" <<'PY'
import json, pathlib, sys
out = pathlib.Path(sys.argv[1])
rows = [line.split("\t") for line in (out / "summary.tsv").read_text().splitlines()]
checks = [{"check": name, "exit_code": int(code), "seconds": int(seconds)} for name, code, seconds in rows]
(out / "summary.json").write_text(json.dumps(checks, indent=2) + "\n")
sys.exit(any(check["exit_code"] for check in checks))
PY
}

case "${1:-} $#" in
  "build 2") build "$2" ;;
  "run 3") run "$2" "$3" ;;
  *) usage ;;
esac
