//! A cluster on one machine: ranks as [threads], [faults](Faults) and adversarial [orders](SeededOrder) for them, and
//! [virtual time](virtual_time) for schedules.
//!
//! This crate is a part of [`fsdp`](https://docs.rs/fsdp), without a promise of stability: any version may change it.
//!
//! [`Threads`] launches ranks that train for real, and that [`Faults`] and a [`SeededOrder`] may disturb. Virtual time runs
//! nothing: from known durations, it computes when operations would begin and end.
#![forbid(unsafe_code)]

mod fault;
mod lock;
mod order;
pub mod threads;
pub mod virtual_time;

pub use fault::{Action, Entry, Fault, Faults, Intercept};
pub use order::SeededOrder;
pub use threads::{ThreadOptions, Threads};
