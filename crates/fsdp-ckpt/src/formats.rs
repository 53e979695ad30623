//! Readers of formats: each makes a [`Checkpoint`](crate::checkpoint::Checkpoint) of files that it knows.
//!
//! They read metadata only, and prove nothing about coverage: what they return is checked by
//! [`check_coverage`](crate::checkpoint::Checkpoint::check_coverage) before data is read.

pub mod dcp;
