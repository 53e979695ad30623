//! What needs a GPU, with the real driver, libtorch's CUDA half and NCCL. Run by scripts/gpu_check.sh.

#[path = "../torch/support.rs"]
mod support;

mod card;
mod operations;
mod runs;
