//! Tests of whole simulated worlds.

/// Runs the conformance suite in simulated worlds.
mod launcher;

/// What every communicator must do.
mod conformance;
/// How worlds fail: errors, panics, divergence, deadlocks, time limits.
mod faults;
/// How ranks share cores and memory.
mod sharing;
