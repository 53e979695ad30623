#!/bin/bash
# Trains on 4 nodes with 8 GPUs each, in an image: Slurm with pyxis and enroot. As slurm.sh otherwise.
#   enroot import --output fsdp-cuda.sqsh docker://REGISTRY#fsdp-cuda:latest
#   sbatch examples/clusters/slurm_image.sh run.toml
# pyxis needs a shell in the image, so it is that of containers/cuda.Dockerfile, not the one for CPUs.
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

# The folder that the job was submitted from is there under its own name; run.out_dir is in it.
srun --wait=60 \
    --container-image="${IMAGE:-$PWD/fsdp-cuda.sqsh}" --container-mounts="$PWD:$PWD" --container-workdir="$PWD" \
    fsdp train "$1" --resume
code=$?
if [ "$code" -eq 75 ] || { [ "$code" -gt 128 ] && [ "$code" -ne 130 ]; }; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
