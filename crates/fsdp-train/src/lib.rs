//! Training runs: the trainer of a rank, whole runs, metrics, export, the oracle and verification.
//!
//! This crate is a part of [`fsdp`](https://docs.rs/fsdp), without a promise of stability: any version may change it.
//!
//! Everything is generic over the compute backend ([`Backend`](fsdp_nn::Backend)) and over the
//! [`Launcher`](fsdp_comm::launch::Launcher) that starts the ranks. Start with [`Job`], which combines a configuration
//! and a model and checks them before any rank starts.
//!
//! | module | contents |
//! |---|---|
//! | [`adapter`] | LoRA: choosing the linear maps to adapt, PEFT's format, merging adapters into their base |
//! | [`audit`](mod@audit) | judges one step of another program, from its states before and after it
//! | [`memory`] | whether a job fits into the memory of this machine |
//! | [`train`](mod@train) | a whole run: output folder, steps, evaluation, metrics, export |
//! | [`evaluate`](mod@evaluate) | loss and perplexity of a model without training it |
//! | [`generate`](mod@generate) | text generation |
//! | [`verify`](mod@verify) | sharded training against the [`Oracle`], communication against closed forms, memory against the ledger |
//! | [`lr`], [`metrics`] | learning rates as functions of the step; the metrics of a step |
//!
//! The guarantees about bitwise equality are in docs/numerics.md of the repository.

pub mod adapter;
mod ahead;
mod atomic_file;
pub mod audit;
pub mod checkpoint;
mod error;
pub mod evaluate;
mod events;
mod export;
mod fit;
pub mod generate;
mod init;
mod job;
mod loss_scale;
pub mod lr;
pub mod memory;
pub mod metrics;
mod not_finite;
mod oracle;
mod rank;
mod rule;
mod shard_runs;
pub mod train;
pub mod verify;
mod waiting;
mod wire_result;

pub use ahead::trace_step;
pub use error::{OptimizerStateError, OutDirError, TrainError};
pub use fit::{expect_positions, expect_settings};
pub use init::{InitSource, NoHead};
pub use job::{Job, draft, listed, plan, predict, rank_tables};
pub use oracle::Oracle;
pub use rank::{Evaluation, RankTrainer};
pub use rule::{LateParams, ParamGroup, param_groups};

/// The version of `fsdp`, shared by all its packages.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
