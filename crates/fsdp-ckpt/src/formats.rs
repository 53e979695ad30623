//! Readers: one module per format, each from a file or directory to a [`Checkpoint`](crate::checkpoint::Checkpoint).
//!
//! They read metadata alone, and trust none of it: what a reader returns lies inside its files. Whether all elements
//! are there, [`check_coverage`](crate::checkpoint::Checkpoint::check_coverage) proves.

pub mod dcp;
pub mod deepspeed;
pub mod native;
pub mod rank_files;
pub mod rank_kind;
pub mod safetensors_files;
pub mod torch_file;
pub mod torch_index;
pub mod xla;

mod beside;
mod contents;
mod detect;
mod fields;
pub(crate) mod local;
mod mesh;
mod optimizer;
mod rank_fault;
mod rank_file;
mod rank_names;
mod shards;
mod trainer_folder;

pub use beside::{Beside, Unread, beside};
pub(crate) use contents::{TORCH_INDEX, TORCH_MODEL};
pub use detect::open;
