//! What communicators share: how ranks are launched, collective algorithms over links, and the conformance
//! suite.
//!
//! - [`launch`]: what a trainer asks of whoever starts its ranks.
//! - [`conformance`]: what every implementation of [`Communicator`](fsdp_core::comm::Communicator) must do,
//!   as plain functions over a [`Launcher`](conformance::Launcher).
#![forbid(unsafe_code)]

pub mod conformance;
pub mod launch;

mod bf16;
