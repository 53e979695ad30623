#!/bin/bash
# Compiles a training step of the six GPT-2 models of the PyTorch/XLA FSDP report (PyTorch blog, 2023; all shapes except
# that of 2B are assumed) with XLA for their slices of TPU v4, without a TPU, and prints a table.
#   scripts/xla_ahead.sh PATH_TO_LIBTPU [LAYERS..]
# LAYERS: depths at which to compile each model, such as "2 4" (the default); "all" is the depth of the model. A second
# table extrapolates XLA's FLOPs from the first two depths to the depth of the model. With more depths it says by how
# much the FLOPs of one layer differ between them.
# MODELS="2B 16B" selects models. SCAN=true puts layers in loops; FLOPs are then left out, since XLA counts a single
# round of a loop. SET="train.micro_batch_size=4 fsdp.reduce_dtype=bf16" changes keys of the run file. FSDP names the
# binary (default: target/release/fsdp), built with --features xla. Memory is in GiB per device.
# libtpu.so is in the package libtpu of PyPI; its license (Google Cloud) forbids copies in this repository.
set -euo pipefail
libtpu=$(realpath "$1")
shift
fsdp=$(realpath "${FSDP:-target/release/fsdp}")
depths=("${@:-2}")
[ $# -gt 0 ] || depths=(2 4)
export TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost TPU_MIN_LOG_LEVEL=3
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"

scan=${SCAN:-false}
changes=()
for change in ${SET:-}; do changes+=(--set "$change"); done
flops=" XLA's FLOPs | products in closed form |"
[ "$scan" = true ] && flops=""
echo "| model | slice (chips) | layers | parameters | XLA's peak | arguments | temporaries | ledger's peak |$flops all-gathers: ours, left | all-to-alls: ours, left | products: ours, left | asynchronous, beside products | in the schedule's order | seconds |"
echo "|---|---|---|---|---|---|---|---|${flops:+---|---|}---|---|---|---|---|---|"
while read -r name layers hidden heads micro chips topology; do
    [[ " ${MODELS:-$name} " == *" $name "* ]] || continue
    for depth in "${depths[@]}"; do
        [ "$depth" = all ] && depth=$layers
        mkdir -p model
        echo "{\"model_type\": \"gpt2\", \"vocab_size\": 50257, \"n_embd\": $hidden, \"n_layer\": $depth, \"n_head\": $heads,
            \"n_positions\": 1024, \"initializer_range\": 0.02, \"embd_pdrop\": 0.0, \"attn_pdrop\": 0.0, \"resid_pdrop\": 0.0}" \
            > model/config.json
        cat > run.toml <<-EOF
		[model]
		path = "model"
		[data]
		train = ["none"]
		format = "text"
		seq_len = 1024
		[train]
		steps = 1
		micro_batch_size = $micro
		global_batch_size = $((micro * chips))
		grad_clip = 1.0
		optimizer = { name = "adamw", lr = 1e-4 }
		lr_schedule = { name = "constant" }
		[fsdp]
		wrap = ["GPT2Block"]
		param_dtype = "bf16"
		reduce_dtype = "f32"
		activation_checkpointing = "full"
		[run]
		out_dir = "out"
		xla = { scan_layers = $scan }
		EOF
        if "$fsdp" compile run.toml --topology "$topology" --plugin "$libtpu" "${changes[@]}" --json > report.json 2> error; then
            python3 - "$name" "$topology" "$depth" "$scan" "$layers" <<-'EOF'
			import json, sys
			name, topology, depth, scan, layers = sys.argv[1:]
			r = json.load(open("report.json"))
			m, ours, left = r["memory"], r["program"]["collectives"], r["optimized"]["collectives"]
			gib = lambda count: f"{count / 2**30:.1f}"
			flops = [f"{r[key]:.3g}" for key in ("flops", "closed_form_product_flops")] if scan == "false" else []
			print("|", " | ".join([
			    name, f"{topology.split(':')[1]} ({r['devices']})", depth, f"{r['parameters'] / 1e9:.2f} B", gib(m["peak_bytes"]),
			    gib(m["arguments_bytes"]), gib(m["temporaries_bytes"]), gib(r["predicted_peak_bytes"]), *flops,
			    *(f"{ours.get(kind, 0)}, {left.get(kind, 0)}" for kind in ("all-gather", "all-to-all")),
			    f"{r['program']['products']}, {r['optimized']['products']}",
			    f"{r['optimized']['asynchronous_collectives']}, {r['optimized']['overlapped_collectives']}",
			    "yes" if r["optimized"]["order_of_schedule"] else "no", f"{r['compiled_seconds']:.0f}",
			]), "|", flush=True)
			with open("flops", "a") as file:
			    print(name, layers, depth, r["flops"], r["closed_form_product_flops"], file=file)
			EOF
        else
            # libtpu's messages about this machine come first.
            echo "| $name | $topology | $depth | $( (grep -m 1 "^error" error || tail -n 1 error) | cut -c 1-200) |"
        fi
    done
done <<'EOF'
2B 18 3072 24 32 4 v4:2x2x1
16B 32 6400 50 16 32 v4:2x4x4
20B 40 6400 50 8 64 v4:4x4x4
32B 40 8192 64 8 64 v4:4x4x4
64B 52 10112 79 8 128 v4:4x4x8
128B 72 12160 95 4 256 v4:4x8x8
EOF

[ "$scan" = true ] || [ ! -f flops ] || python3 - <<'EOF'
runs = {}
for line in open("flops"):
    name, layers, depth, *flops = line.split()
    runs.setdefault((name, int(layers)), []).append((int(depth), *map(float, flops)))
print("\n| model | layers | XLA's FLOPs, extrapolated | products in closed form | ratio | FLOPs of a layer: XLA's | in closed form | XLA's differ by |")
print("|---|---|---|---|---|---|---|---|")
for (name, layers), found in runs.items():
    if len(found) < 2:
        continue
    (first, *begin), (next, *end) = found[:2]
    xla, closed = ((b - a) / (next - first) for a, b in zip(begin, end))
    whole = [a + (layers - first) * layer for a, layer in zip(begin, (xla, closed))]
    steps = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(found, found[1:])]
    spread = f"{(max(steps) - min(steps)) / xla:.1e}" if len(steps) > 1 else "-"
    print(f"| {name} | {layers} | {whole[0]:.4g} | {whole[1]:.4g} | {whole[0] / whole[1]:.4f} | {xla:.4g} | {closed:.4g} | {spread} |")
EOF
