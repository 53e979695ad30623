//! Simulated misfortune for worlds of [threads](fsdp_comm::threads): [`Faults`] make ranks fail on purpose, and a
//! [`SeededOrder`] picks adversarial orders of issue.
//!
//! Both act on the code that trains, and on nothing else: there are no simulated wires, latencies or times here.
#![forbid(unsafe_code)]

mod fault;
mod order;

pub use fault::{Action, Fault, Faults};
pub use order::SeededOrder;
