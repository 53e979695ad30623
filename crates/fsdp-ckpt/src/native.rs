//! Native checkpoints: one safetensors file per rank and a manifest, saved by all ranks and committed by one.
//!
//! ```text
//! out_dir/.lock                                    held by the process of rank 0 while the run lives
//! out_dir/checkpoints/step-00000050/               complete: it gets this name last
//!     shard-00001-model-00001-of-00001.safetensors     rank 0: its rows of parameters and optimizer state
//!     shard-00002-model-00001-of-00001.safetensors     rank 1
//!     manifest.json                                    tensors, rows, checksums, state of the run
//! out_dir/checkpoints/step-00000100.<attempt>.tmp/ a save in progress, or a leftover of one
//! out_dir/checkpoints/step-00000075.diverged/      set aside: its weights gave a non-finite loss
//! out_dir/checkpoints/reserved-00001.<attempt>.tmp disk space for rank 0's part of the next save
//! ```
//!
//! | every rank | | rank 0 in addition |
//! | --- | --- | --- |
//! | [`SavePlan::new`] | equal layouts, without communication | [`RunDir::lock`], [`RunLock::remove_leftovers`] |
//! | | disk space for the next save | [`RunLock::reserve`] |
//! | [`RankSave::create`] | the rank's file, in `step-N.<attempt>.tmp` | |
//! | [`RankSave::write_rows`] | rows, checksummed as they are written | |
//! | [`RankSave::finish`] | makes the file durable and returns a [`RankReport`] | |
//! | | all reports, checked against the plan | [`RunLock::commit`], [`RunLock::keep_last`] |
//!
//! In an object store the rank files are in `step-N/<attempt>/` from the start, and the manifest is put into `step-N/`
//! last, on the condition that it does not exist: see `objects`.
//!
//! The caller sends reports to rank 0 and its decision to the others: nothing here waits.
//!
//! The manifest records no units and no mesh: [`NativeReader::read_rows`] reads any rows, so any world size can resume.
//! PyTorch's `HuggingFaceStorageReader` reads the directory too; it ignores the manifest.
//!
//! Every byte is protected. The data is cut into chunks of whole rows of at most 16 MiB (a longer row is one chunk),
//! each with a CRC-64 in the manifest, and so are the file headers. The manifest ends with its own CRC-64.

mod attempt;
mod commit;
mod manifest;
mod objects;
mod plan;
mod rank_save;
mod reader;
mod reserve;
mod run_dir;
mod seal;
mod values;

pub use attempt::Attempt;
pub(crate) use commit::{manifest, manifest_file};
pub use manifest::{MANIFEST_FILE, Manifest, ManifestFile, ManifestShard, ManifestTensor};
pub(crate) use plan::SHARD_MARK;
pub use plan::{CHUNK_BYTES_MAX, RankFile, SavePlan, SavedTensor, Shard, even_rows};
pub use rank_save::{RankReport, RankSave};
pub use reader::NativeReader;
pub use reserve::{SaveSpace, free_bytes};
pub(crate) use run_dir::step_of;
pub use run_dir::{RunDir, RunLock};
pub(crate) use values::{RUN_STATE, run_state_to_value, value_to_run_state};

#[cfg(test)]
mod tests;
