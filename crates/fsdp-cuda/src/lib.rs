//! Ranks on devices: CUDA memory, kernels and NCCL, and compute by libtorch.
