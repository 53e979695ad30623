#!/bin/bash
# A run of as many processes as there are slots, under mpirun of Open MPI or MPICH. Run.out_dir is a folder that all nodes see.
#   examples/clusters/mpirun.sh 32 run.toml
exec mpirun -np "$1" fsdp train "$2" --resume
