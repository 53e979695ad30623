//! Tests of whole simulated worlds.

/// A memory whose queues run as late as they may.
#[expect(clippy::unwrap_used, reason = "only tests use it")]
mod lagging;

/// What every communicator must do.
mod conformance;
/// How worlds fail: errors, panics, divergence, deadlocks, time limits.
mod faults;
/// Whether collectives are ordered by events where devices need it.
mod queues;
/// How ranks share cores and memory.
mod sharing;
