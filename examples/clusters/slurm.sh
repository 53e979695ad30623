#!/bin/bash
# Trains on 4 nodes with 8 processes each. Slurm requeues the job when its time is up or a node fails.
#   sbatch examples/clusters/slurm.sh run.toml
# `RequeueExit=75` in slurm.conf does the same for every job; this script requests it for its own.
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

# A killed task ends all others, which may take a few seconds: --wait kills those that are left after a minute.
srun --wait=60 fsdp train "$1" --resume
code=$?
# 75: stopped and saved, or a failure that may be transient. 128 and more: a signal killed a task, which srun reports
# even though the others exited with 75. 130: interrupted by a user.
if [ "$code" -eq 75 ] || { [ "$code" -gt 128 ] && [ "$code" -ne 130 ]; }; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
