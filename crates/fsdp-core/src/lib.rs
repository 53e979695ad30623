//! Contracts, layout, schedule, checker, ledger and engine of fully sharded data parallel training.
#![forbid(unsafe_code)]

mod dtype;

pub use dtype::DType;
