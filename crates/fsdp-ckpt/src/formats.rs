//! Readers: one module per format, each from a file or directory to a [`Checkpoint`](crate::checkpoint::Checkpoint).
//!
//! They read metadata alone, and trust none of it: what a reader returns lies inside its files.

pub mod dcp;
mod detect;
pub mod native;
pub mod safetensors_files;
pub mod torch_file;

pub use detect::open;
