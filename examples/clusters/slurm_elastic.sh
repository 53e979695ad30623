#!/bin/bash
# Trains on 4 nodes and continues with as few as 2 when others fail, without waiting in the queue.
#   sbatch examples/clusters/slurm_elastic.sh run.toml
# One agent per node starts 8 processes. Agents find each other through the output folder, which all nodes must see.
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append

srun --no-kill --kill-on-bad-exit=0 fsdp launch --nnodes 2:4 --nproc 8 --max-restarts 100 -- train "$1" --resume
code=$?
# 75: stopped and saved, or too few nodes are left. 128 and more: a signal killed an agent.
if [ "$code" -eq 75 ] || { [ "$code" -gt 128 ] && [ "$code" -ne 130 ]; }; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
