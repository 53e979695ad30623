#!/bin/bash
# Trains on several nodes under torchrun; start this script on each node.
#   HEAD=node1:29500 NODES=2 examples/clusters/torchrun.sh run.toml
# torchrun restarts after every failure, including configuration errors: keep --max-restarts small.
exec torchrun --nnodes "${NODES:?how many}" --nproc_per_node "${PROCESSES:-8}" \
    --rdzv_backend c10d --rdzv_endpoint "${HEAD:?host:port of one node}" --rdzv_id "${RUN_ID:-fsdp}" \
    --max-restarts 3 --no-python fsdp train "$1" --resume
