//! Readers: one module per format, each from a file or directory to a [`Checkpoint`](crate::checkpoint::Checkpoint).
//!
//! They read metadata alone, and trust none of it: what a reader returns lies inside its files.

mod detect;
pub mod safetensors_files;
pub mod torch_file;

pub use detect::open;
