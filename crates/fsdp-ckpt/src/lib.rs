//! Reads, writes, converts and verifies checkpoints, in the formats of PyTorch and others and in the native format.
//!
//! This crate is a part of [`fsdp`](https://docs.rs/fsdp), without a promise of stability: any version may change it.
//!
//! | module | contents |
//! | --- | --- |
//! | [`safetensors`] | the file format: header parser with limits, canonical layout, positioned reads |
//! | [`model_files`] | a Hugging Face model, in one file or in several with an index, read by rows |
//! | [`export`] | writes such a model: any number of writers fill in their rows, then one commits it |
//! | [`checkpoint`] | any checkpoint: named tensors, and the locations of their bytes |
//! | [`native`] | sharded checkpoints of training runs: saved by all ranks, committed by one |
//! | [`objects`] | small files in object stores |
//! | [`formats`] | reads any format: [`formats::open`] |
//! | [`targets`] | the writable formats, each as a plan of files |
//! | [`training`] | finds the weights and optimizer states that training needs, under the names of a model |
//! | [`transfer`] | moves tensor bytes from a checkpoint into planned files |
//! | [`conversion`] | converts any readable format into any writable one |
//! | [`verify`] | reads all of a checkpoint and reports damage and unprotected bytes |
//! | [`diff`] | compares two checkpoints of any formats |
//!
//! No whole tensor is ever held in memory: reads and writes name rows, and conversions run in bounded chunks. Files are
//! never memory-mapped, because mapped reads hang or crash on network file systems. Positioned reads and writes use the
//! standard library's Unix extensions, so this crate builds on Unix only.
//!
//! Foreign formats and the native format are in one crate, because both build on the same checkpoints, archives,
//! transfer and errors, and conversion uses both. Two crates would need a third one below them, which would have to
//! make public what is private here.
//!
//! **A row** is one index of the first dimension: a tensor of shape `[d0, d1, ..]` has `d0` rows of `d1 * ..` elements,
//! and a 0-d tensor has one row of one element.
#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod conversion;
pub mod diff;
pub mod digest;
mod error;
pub mod export;
pub mod formats;
#[doc(hidden)]
pub mod fuzzing;
pub mod model_files;
pub mod native;
pub mod objects;
pub mod safetensors;
pub mod targets;
pub mod training;
pub mod transfer;
pub mod verify;

mod bytes;
mod differences;
mod file_io;
mod files;
mod floats;
mod lock;
mod pickle;
#[cfg(test)]
mod random_checkpoint;
mod ranges;
mod rows;
mod torch;
mod unique_map;
mod zip;

pub use files::url::is_url;

pub use error::{Error, Fault, FileAction};
