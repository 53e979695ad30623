//! Tests of whole simulated worlds.

/// A memory whose queues run as late as possible.
#[expect(clippy::unwrap_used, reason = "only tests use it")]
mod lagging;

/// The conformance suite of all communicators.
mod conformance;
/// How worlds fail: errors, panics, divergence, deadlocks, time limits.
mod faults;
/// Tests that events order collectives on devices whose queues lag behind the host.
mod queues;
/// How ranks share cores and memory.
mod sharing;
