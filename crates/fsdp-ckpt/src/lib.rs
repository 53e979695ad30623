//! Checkpoints: reading, writing, converting and checking them, in the formats of PyTorch and others, and our own.
//!
//! | module | what |
//! | --- | --- |
//! | [`safetensors`] | the file format: header parser with limits, canonical layout, positioned reads |
//! | [`model_files`] | a Hugging Face model, in one file or in several with an index, read by rows |
//! | [`export`] | writing such a model: any number of writers put their rows in place, then one commit |
//! | [`checkpoint`] | any checkpoint: named tensors, and where their bytes lie |
//! | [`native`] | sharded checkpoints of training runs: saved by all ranks, committed by one |
//! | [`objects`] | small files in object stores |
//! | [`formats`] | reading any format: [`formats::open`] |
//! | [`targets`] | formats that are written, each as a plan of files |
//! | [`training`] | what training needs of a checkpoint, found under the names of a model |
//! | [`transfer`] | moving tensor bytes from a checkpoint into planned files |
//! | [`conversion`] | from any format that is read to any that is written |
//! | [`inspect`] | what a checkpoint holds, in numbers |
//! | [`verify`] | reading all of a checkpoint: what is damaged, and what nothing protects |
//! | [`diff`] | comparing two checkpoints of any formats |
//!
//! Nothing here holds a whole tensor: reads and writes name rows, and conversions run in bounded chunks.
//! Files are never memory-mapped (mapped reads hang or crash on network file systems). Positioned reads and
//! writes come from the standard library's Unix extensions, so this crate builds on Unix only.
//!
//! Reading others' formats and keeping our own is one crate: both rest on the same checkpoints, archives, transfer and
//! errors, so two crates would need a third below them, which would have to make public what is private here;
//! and conversion uses both.
//!
//! **A row** is one index of the first dimension: a tensor of shape `[d0, d1, ..]` has `d0` rows of
//! `d1 * ..` elements, and a 0-d tensor has one row of one element.
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
pub mod inspect;
pub mod model_files;
pub mod native;
pub mod objects;
pub mod safetensors;
pub mod targets;
pub mod training;
pub mod transfer;
pub mod verify;

mod bytes;
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

pub use error::{DtypeDifference, Error, Fault, FileAction, NameDifferences, ShapeDifference};
