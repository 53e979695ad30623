//! Tests of the NCCL communicator through the real bindings, over a fake NCCL.
//!
//! `tests/fake_nccl` is compiled when first needed. It works on host memory and enforces NCCL's rules; see its source.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod fake;
#[path = "../fake_cuda/mod.rs"]
mod fake_cuda;
#[path = "../device/job.rs"]
mod job;
mod memory;
#[path = "../device/mixed.rs"]
mod mixed;

/// Checks the calls, their groups and their order.
mod calls;
/// The conformance suite of all communicators.
mod conformance;
/// The conformance suite on CUDA memory, over a fake driver and a fake NCCL.
mod cuda;
/// How a failing rank, collective or library affects the other ranks.
mod failures;
/// Finding and opening the library.
mod opening;
/// Ranks in several processes.
mod processes;
/// Number of NCCL communicators created, and how groups share them.
mod sharing;
/// Whole runs in one process and in several.
mod training;
