//! Tests that need a GPU, with the real driver, NVRTC, libtorch's CUDA half and NCCL. Run by scripts/gpu_check.sh.
//!
//! The project's own kernels are tested by the same files as on the fake driver.

#![expect(clippy::unwrap_used, reason = "a test panics when a call fails")]
#![expect(clippy::duplicate_mod, reason = "kernels of ours and compositions pass the same tests")]

#[path = "../torch/support.rs"]
mod support;

#[path = "../device/dropout.rs"]
mod dropout;
#[path = "../device/fused.rs"]
mod fused;
#[path = "../device/kernels.rs"]
mod kernels;
#[path = "../device/losses.rs"]
mod losses;
#[path = "../torch/mixed_precision.rs"]
mod mixed_precision;
#[path = "../device/operands.rs"]
mod operands;
#[path = "../device/update.rs"]
mod update;
#[path = "../device/values.rs"]
mod values;

mod card;
mod composed;
mod jobs;
mod operations;
mod ranks;
mod runs;
mod subject;
