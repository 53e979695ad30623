//! Native checkpoints: one safetensors file per rank and a manifest, saved by all ranks and committed by one.
//!
//! ```text
//! out_dir/.lock                                    held by the process of rank 0 while the run lives
//! out_dir/checkpoints/step-00000050/               complete: the name is given last
//!     shard-00001-model-00001-of-00001.safetensors     rank 0: its rows of parameters and optimizer state
//!     shard-00002-model-00001-of-00001.safetensors     rank 1
//!     manifest.json                                    tensors, rows, checksums, state of the run
//! out_dir/checkpoints/step-00000100.tmp/           a save under way, or a leftover of one
//!     shard-..., rank-0.done, rank-1.done
//! ```
//!
//! | every rank | | rank 0 besides |
//! | --- | --- | --- |
//! | [`SavePlan::new`] | the layout, equal everywhere without communication | [`RunDir::lock`], [`RunLock::remove_leftovers`] |
//! | [`RankSave::create`] | its file, in `step-N.tmp` | |
//! | [`RankSave::write_rows`] | rows, with checksums on the way | |
//! | [`RankSave::finish`] | durable, then `rank-R.done` | |
//! | [`RankDone::wait`] | for the final name, or a failure | [`RunLock::commit`], [`RunLock::keep_last`] |
//!
//! Ranks meet in the directory only, never on a communicator, so that a save runs beside training. A failure of
//! any rank fails the save on all: who fails leaves `rank-R.failed` (rank 0 `commit.failed`) with its reason,
//! and everyone looks for those while waiting. To commit, rank 0 takes the `done` markers away one by one; a
//! rank that has waited too long takes its own away. Whoever comes second finds it gone, so that both agree.
//!
//! The manifest records no units and no mesh: [`NativeReader::read_rows`] serves any rows, so any world size
//! can resume. PyTorch's `HuggingFaceStorageReader` reads the directory too; it ignores the manifest.
//!
//! Every byte is protected. The data is cut into chunks of whole rows of at most 16 MiB (a longer row is one
//! chunk), each with a CRC-64 in the manifest; so are the headers of the files; and the manifest ends in the
//! CRC-64 of itself.

mod commit;
mod manifest;
mod markers;
mod plan;
mod rank_save;
mod reader;
mod run_dir;
mod seal;
mod values;
mod wait;

pub(crate) use commit::{manifest, manifest_file};
pub use manifest::{MANIFEST_FILE, Manifest, ManifestFile, ManifestShard, ManifestTensor};
pub(crate) use plan::SHARD_MARK;
pub use plan::{CHUNK_BYTES_MAX, RankFile, SavePlan, SavedTensor, Shard, even_rows};
pub use rank_save::{RankDone, RankSave};
pub use reader::NativeReader;
pub use run_dir::{RunDir, RunLock};
pub(crate) use run_dir::{name_of, step_of};
pub(crate) use values::{RUN_STATE, run_state_to_value, value_to_run_state};
pub use wait::WaitLimit;

#[cfg(test)]
mod tests;
