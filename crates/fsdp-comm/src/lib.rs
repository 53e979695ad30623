//! What communicators share: collective algorithms over links, and the conformance suite.
//!
//! - [`conformance`]: what every implementation of [`Communicator`](fsdp_core::comm::Communicator) must do,
//!   as plain functions over a [`Launcher`](conformance::Launcher).
#![forbid(unsafe_code)]

pub mod conformance;

mod bf16;
