#!/bin/sh
# Regenerates all fixtures: PYTHON=venv/bin/python ./make_all.sh
# Those of Orbax need an environment of their own: ORBAX_PYTHON=other/bin/python
set -eu
python=$(command -v "${PYTHON:-python}")
cd "$(dirname "$0")"
for script in fsdp2 late_states fused_experts accelerate_states trainer deepspeed_zero deepspeed_universal deepspeed_experts deepspeed_parallel torch_files lora lora_states verl_ranks torchtitan_dcp lightning_ckpt mxfp4 megatron_states; do
    "$python" "$script.py"
done
if [ -n "${ORBAX_PYTHON:-}" ]; then
    "$ORBAX_PYTHON" orbax_states.py
fi
