//! CUDA memory and kernels through the real bindings, on a fake driver.

#![expect(clippy::unwrap_used, reason = "a test panics when a call fails")]

#[path = "../fake_cuda/mod.rs"]
mod fake_cuda;

mod failures;
mod fused;
mod kernels;
mod memory;
mod offload;
mod ordering;
mod update;
mod values;
mod world;
