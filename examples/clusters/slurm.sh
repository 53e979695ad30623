#!/bin/bash
# A run on 4 nodes with 8 processes each, which Slurm puts back into the queue when its time is up or a node fails.
#   sbatch examples/clusters/slurm.sh run.toml
# `RequeueExit=75` in slurm.conf does the same for every job; here the script asks for it.
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

# A task that was killed ends all others, which may take a few seconds: --wait ends what is left after a minute.
srun --wait=60 fsdp train "$1" --resume
code=$?
# 75: stopped and saved, or something failed that can pass. 128 and more: a task was killed by a signal, which srun says
# although the others have ended with 75. 130: somebody has interrupted it.
if [ "$code" -eq 75 ] || { [ "$code" -gt 128 ] && [ "$code" -ne 130 ]; }; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
