//! Simulation: fault injection for worlds of [threads](fsdp_comm::threads), and [virtual time](virtual_time) for
//! schedules.
//!
//! This crate is a part of [`fsdp`](https://docs.rs/fsdp), without a promise of stability: any version may change it.
//!
//! [`Faults`] make ranks fail on purpose, and a [`SeededOrder`] picks adversarial issue orders; both act on the code
//! that trains. Virtual time runs nothing: from known durations, it computes when operations would begin and end.
#![forbid(unsafe_code)]

mod fault;
mod order;
pub mod virtual_time;

pub use fault::{Action, Fault, Faults};
pub use order::SeededOrder;
