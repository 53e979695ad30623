//! Data, configuration, trainer, metrics, oracle and verification.
#![forbid(unsafe_code)]

pub mod config;
pub mod data;
mod error;
mod export;
mod init;
mod job;
pub mod lr;
pub mod metrics;
mod oracle;
mod rank;
mod rule;
mod run_data;
pub mod train;
pub mod verify;

pub use error::TrainError;
pub use export::export_model;
pub use init::InitSource;
pub use job::{Job, plan, predict};
pub use oracle::Oracle;
pub use rank::{Evaluation, RankTrainer};
pub use rule::TrainBackend;
pub use run_data::RunData;
