//! Data, configuration, trainer, metrics, oracle and verification.
#![forbid(unsafe_code)]

pub mod config;
pub mod data;

pub mod lr;
pub mod metrics;
