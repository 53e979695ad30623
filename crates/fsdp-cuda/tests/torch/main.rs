//! Tests of libtorch as a backend on the host.

#![expect(clippy::unwrap_used, reason = "a test panics when a call fails")]

#[path = "../../../../tests/tests/hooked.rs"]
mod hooked;
#[path = "../gpu/jobs.rs"]
mod jobs;
#[path = "../device/kernels.rs"]
mod kernels;
#[path = "../device/update.rs"]
mod update;
#[path = "../device/values.rs"]
mod values;

mod composed;
mod expert_axis;
mod mixed_precision;
mod operations;
mod parity;
mod ranks;
mod subject;
mod support;
