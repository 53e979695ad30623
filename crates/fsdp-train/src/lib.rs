//! Training runs: configuration, data, the trainer of a rank, metrics, export, the oracle and verification.
//!
//! Generic over the backend that computes ([`TrainBackend`]) and over whoever starts the ranks
//! ([`Launcher`](fsdp_comm::launch::Launcher)). Start with [`Job`]: a configuration and a model, put together and
//! checked before any rank starts.
//!
//! | module | what |
//! |---|---|
//! | [`adapter`] | LoRA: which linear maps are adapted, PEFT's format, models with their adapters added |
//! | [`config`] | the run file: TOML, `--set`, Hugging Face's `fsdp_config.json`, every default written out |
//! | [`data`] | files, tokenizers, packing, the order of samples |
//! | [`memory`] | whether a job fits into this machine |
//! | [`input_file`] | reading files that somebody else names |
//! | [`train`](mod@train) | a whole run: output folder, steps, evaluation, metrics, export |
//! | [`evaluate`](mod@evaluate) | loss and perplexity of a model that is not trained |
//! | [`generate`](mod@generate) | a model that goes on with a text |
//! | [`verify`](mod@verify) | sharded training against the [`Oracle`], communication against closed forms, memory against the ledger |
//! | [`lr`], [`metrics`] | learning rates as functions of the step; what a step reports |
//!
//! What is promised of bits stands in docs/numerics.md of the repository.

pub mod adapter;
mod ahead;
pub mod checkpoint;
pub mod config;
pub mod data;
mod error;
pub mod evaluate;
mod events;
mod export;
mod fit;
pub mod generate;
mod held;
mod init;
pub mod input_file;
mod job;
mod loss_scale;
pub mod lr;
pub mod memory;
pub mod metrics;
mod not_finite;
mod oracle;
mod rank;
mod rule;
mod run_data;
mod told;
pub mod train;
mod true_path;
pub mod verify;
mod waiting;
mod whole_file;

pub use ahead::step_ahead;
pub use error::TrainError;
pub use fit::{expect_positions, expect_settings};
pub use init::InitSource;
pub use job::{Job, draft, listed, plan, predict, rank_tables};
pub use oracle::Oracle;
pub use rank::{Evaluation, RankTrainer};
pub use rule::{ParamGroup, TrainBackend, param_groups};
pub use run_data::RunData;

/// The version of `fsdp`: all its packages have one.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The examples of the repository's README, compiled with the tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
