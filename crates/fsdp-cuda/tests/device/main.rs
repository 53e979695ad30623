//! Tests of CUDA memory and kernels through the real bindings, on a fake driver.

#![expect(clippy::unwrap_used, reason = "a test panics when a call fails")]

#[path = "../fake_cuda/mod.rs"]
mod fake_cuda;

mod dropout;
mod engine;
mod failures;
mod fused;
mod job;
mod kernels;
mod losses;
mod memory;
mod mixed;
mod offload;
mod operands;
mod ordering;
mod subject;
mod update;
mod values;
mod waiting;
mod world;
