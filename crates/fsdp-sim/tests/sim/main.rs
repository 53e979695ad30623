//! Tests of whole simulated worlds.

/// A memory whose queues run as late as possible.
#[expect(clippy::unwrap_used, reason = "only tests use it")]
mod lagging;

/// The conformance suite of all communicators.
mod conformance;
/// How worlds fail: errors, panics, divergence, deadlocks, time limits.
mod faults;
/// Tests that collectives are ordered by events where devices need it.
mod queues;
/// How ranks share cores and memory.
mod sharing;
