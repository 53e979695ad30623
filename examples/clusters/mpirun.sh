#!/bin/bash
# Trains with the given number of processes (slots) under mpirun of Open MPI or MPICH. All nodes must see run.out_dir.
#   examples/clusters/mpirun.sh 32 run.toml
exec mpirun -np "$1" fsdp train "$2" --resume
