//! Tests links over a fake MPI, whose processes are threads, and over the MPI libraries installed on this machine.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod conformance;
mod exchanges;
mod failures;
mod fake;
mod opening;
mod real;
