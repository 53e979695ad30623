//! Readers: one module per format, each of which turns a file or directory into a
//! [`Checkpoint`](crate::checkpoint::Checkpoint).
//!
//! Readers read metadata only and trust none of it: every range that they return is inside its file. They do not prove
//! that every element is present; [`check_coverage`](crate::checkpoint::Checkpoint::check_coverage) does.

pub mod dcp;
pub mod deepspeed;
pub mod megatron;
pub mod megatron_ranks;
pub mod native;
pub mod orbax;
pub mod rank_files;
pub mod safetensors_files;
pub mod torch_file;
pub mod torch_index;
pub mod xla;

mod contents;
mod detect;
mod fields;
pub(crate) mod local;
mod merge;
mod optimizer;
mod other_contents;
mod rank_fault;
mod rank_file;
mod rank_kind;
mod rank_names;
mod trainer_folder;
mod tree;

pub(crate) use contents::{TORCH_INDEX, TORCH_MODEL};
pub use detect::open;
pub use other_contents::{OtherContents, Unread, beside};
