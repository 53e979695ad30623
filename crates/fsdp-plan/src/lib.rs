//! Predicts how long a step takes, and what that time consists of, on hardware that need not be available.
//!
//! This crate is a part of [`fsdp`](https://docs.rs/fsdp), without a promise of stability: any version may change it.
//!
//! The input is the schedule that a run compiles ([`fsdp_core::schedule`]) and the operations that its blocks run
//! ([`fsdp_nn::listing`]): there is no second model of sharded training. [`prices`] computes the duration of each
//! operation on a [`cluster`]; [virtual time](fsdp_sim::virtual_time) combines the durations as queues and waits do.
//!
//! ```text
//! schedule, listings ── work ── prices ── virtual time ── Forecast
//!                                  │
//!              cluster (specifications, measured points), constants (fitted), software
//! ```
#![forbid(unsafe_code)]

pub mod band;
pub mod cluster;
mod constants;
mod forecast;
pub mod measured;
pub mod prices;
mod software;
mod work;

pub use constants::{Constants, stand_in};
pub use forecast::{Forecast, Planned, forecast};
pub use software::{AttentionKernel, Elementwise, Recomputed, Software};
pub use work::{AttentionWork, CallWork, Calls, Listed, OpWork, Product, StepWork};
