#!/usr/bin/env bash
# Checks everything that needs a GPU, in ten minutes, and leaves JSON and logs in a folder.
#
#   scripts/gpu_check.sh build DIR       on any machine with libtorch: what is to be run, into DIR
#   scripts/gpu_check.sh run DIR OUT     on a machine with a GPU, from the root of the repository
#
# `build` needs what `cargo build --features cuda` needs (docs/gpu.md), and `strip`. `run` needs the driver and the
# libraries of the wheel torch==2.11.0; PYTHON names an interpreter that has them (default: python3). After BUDGET seconds
# (default: 590) what is left is cut off and counts as failed. With PEER=1 the comparison with PyTorch is run too, which
# takes up to twenty minutes more.
set -euo pipefail

usage() {
  sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
  exit 2
}

build() {
  local dir=$1 executable
  mkdir -p "$dir"
  cargo build --release -p fsdp-cli -p fsdp-gpu-bench --features fsdp-cli/cuda,fsdp-gpu-bench/torch
  # Without debug information, the binaries are small enough to copy to another machine.
  for executable in fsdp fsdp-gpu-bench; do
    strip -o "$dir/$executable" "${CARGO_TARGET_DIR:-target}/release/$executable"
  done
  cargo test --release -p fsdp-cuda --features gpu-tests --test gpu --no-run
  # Everything is built now, so this only prints the path again.
  executable=$(cargo test --release -p fsdp-cuda --features gpu-tests --test gpu --no-run 2>&1 |
    sed -n 's/.*Executable .*(\(.*\))$/\1/p')
  strip -o "$dir/gpu-tests" "$executable"
  echo "built: $dir/fsdp, $dir/fsdp-gpu-bench, $dir/gpu-tests"
}

# Runs one check with a time limit and kills it if it does not stop. Logs its output, and adds it to the summary.
check() {
  local name=$1 limit=$2 begin left code=0
  shift 2
  begin=$(date +%s)
  left=$((deadline - begin))
  timeout -k 10 "$((left < 1 ? 1 : left < limit ? left : limit))" "$@" >"$out/$name.out" 2>"$out/$name.log" || code=$?
  printf '%s\t%s\t%s\n' "$name" "$code" "$(($(date +%s) - begin))" >>"$out/summary.tsv"
  if [ "$code" = 0 ]; then echo "ok       $name"; else echo "FAILED   $name (exit code $code, see $out/$name.log and $out/$name.out)"; fi
}

# The same for a command that prints JSON.
check_json() {
  check "$@"
  mv "$out/$1.out" "$out/$1.json"
}

run() {
  local dir=$1 fsdp=$1/fsdp torch
  python=${PYTHON:-python3} out=$2 deadline=$(($(date +%s) + ${BUDGET:-590}))
  mkdir -p "$out"
  : >"$out/summary.tsv"
  trap 'summarize || exit 1' EXIT
  torch=$("$python" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')
  export LD_LIBRARY_PATH="$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

  check_json doctor 60 "$fsdp" doctor --json
  for model in gpt2-124m llama-1.2b; do
    check_json "bench-$model" 150 "$dir/fsdp-gpu-bench" --model "$model" --json
  done
  check train-nccl 60 "$fsdp" train examples/quickstart.toml --set 'run.device="cuda"' --set run.ranks=1 \
    --set "run.out_dir=\"$out/train\"" --overwrite
  on_gpu=(--set 'run.device="cuda"' --set run.share_gpu=true --steps 2)
  for policy in none full selective; do
    check "verify-checkpointing-$policy" 60 "$fsdp" verify examples/quickstart.toml "${on_gpu[@]}" \
      --world-sizes 1,2,4 --set "fsdp.activation_checkpointing=\"$policy\"" --json "$out/verify-$policy.json"
  done
  check verify-bf16 60 "$fsdp" verify examples/quickstart.toml "${on_gpu[@]}" \
    --set 'fsdp.param_dtype="bf16"' --json "$out/verify-bf16.json"
  check verify-f16 60 "$fsdp" verify examples/quickstart.toml "${on_gpu[@]}" \
    --set 'fsdp.param_dtype="f16"' --set train.loss_scale.init=256 --json "$out/verify-f16.json"
  check verify-offload 60 "$fsdp" verify examples/quickstart.toml "${on_gpu[@]}" \
    --set 'fsdp.offload="cpu"' --json "$out/verify-offload.json"
  check tests 300 "$dir/gpu-tests" --test-threads 1
  if [ -n "${PEER:-}" ]; then
    deadline=$(($(date +%s) + 1200))
    check compare 1200 "$python" bench/gpu/compare.py --python "$python" --fsdp "$dir/fsdp-gpu-bench" --runs 1 \
      --json "$out/compare.json"
  fi
}

# Writes the outcomes as JSON, however the run ended. The exit code is 1 if a check failed or was not reached.
summarize() {
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
