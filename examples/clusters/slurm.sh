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

# --kill-on-bad-exit: a task that was killed ends the step, and the others have ended by themselves before.
srun --kill-on-bad-exit=1 fsdp train "$1" --resume
code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
