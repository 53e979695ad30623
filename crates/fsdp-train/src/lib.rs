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
//! | [`adapter`] | LoRA: choosing the linear maps to adapt, PEFT's format |
//! | [`audit`](mod@audit) | judges one step of another program, from its states before and after it
//! | [`memory`] | whether a job fits into the memory of this machine |
//! | [`train`](mod@train) | a whole run: output folder, steps, evaluation, metrics, export |
//! | [`evaluate`](mod@evaluate) | loss and perplexity of a model without training it |
//! | [`generate`](mod@generate) | text generation |
//! | [`verify`](mod@verify) | sharded training against the [`Oracle`], communication against closed forms, memory against the ledger |
//! | [`lr`], [`metrics`] | learning rates as functions of the step; the metrics of a step |
//!
//! The guarantees about bitwise equality are in docs/numerics.md of the repository.

// Each module imports only from those after it.

pub mod audit;
pub mod evaluate;
pub mod train;
pub mod verify;

pub mod memory;
mod rank;

mod events;
mod export;
mod not_finite;

mod ahead;
pub mod checkpoint;
mod oracle;

pub mod generate;
mod job;
mod waiting;

mod fit;
mod init;
pub mod metrics;

pub mod adapter;
mod atomic_file;
mod router_bias;
mod rule;
mod wire_result;

mod error;
mod loss_scale;
pub mod lr;
mod shard_runs;

pub use ahead::trace_step;
pub use error::{Ending, Kept, TrainError};
pub use fit::{expect_positions, expect_settings};
pub use init::{InitSource, names as parameter_names};
pub use job::{Job, draft, expect_chunks, listed, plan, predict, rank_tables};
pub use metrics::Evaluation;
pub use oracle::Oracle;
pub use rank::RankTrainer;
pub use rule::{LateParams, ParamGroup, param_groups};

/// The version of `fsdp`, shared by all its packages.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
