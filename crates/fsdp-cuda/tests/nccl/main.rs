//! NCCL's communicator, driven through the real bindings over a library that stands in for NCCL.
//!
//! `tests/fake_nccl` is compiled when it is first needed. It works on host memory and keeps NCCL's rules; see there.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod fake;
#[path = "../fake_cuda/mod.rs"]
mod fake_cuda;
#[path = "../device/job.rs"]
mod job;
mod memory;
#[path = "../device/mixed.rs"]
mod mixed;

/// What is called, in which groups and order.
mod calls;
/// The suite of every communicator.
mod conformance;
/// The suite on CUDA memory: two stand-ins, for the driver and for NCCL.
mod cuda;
/// What a failing rank, collective or library does to the others.
mod failures;
/// Finding and opening the library.
mod opening;
/// Ranks in several processes.
mod processes;
/// How many communicators are made.
mod sharing;
/// Whole runs in one process and in several.
mod training;
