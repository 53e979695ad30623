#!/bin/bash
# A run on several nodes under torchrun; started on each of them.
#   HEAD=node1:29500 NODES=2 examples/clusters/torchrun.sh run.toml
# torchrun starts again after every failure, configuration errors included: keep --max-restarts small.
exec torchrun --nnodes "${NODES:?how many}" --nproc_per_node "${PROCESSES:-8}" \
    --rdzv_backend c10d --rdzv_endpoint "${HEAD:?host:port of one node}" --rdzv_id "${RUN_ID:-fsdp}" \
    --max-restarts 3 --no-python fsdp train "$1" --resume
