//! Tests of whole simulated worlds.

/// What every communicator must do.
mod conformance;
/// How worlds fail: errors, panics, divergence, deadlocks, time limits.
mod faults;
/// How ranks share cores and memory.
mod sharing;
