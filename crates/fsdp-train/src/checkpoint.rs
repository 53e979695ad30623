//! Checkpoints of a run: which rank saves what, and how its state is read again.
//!
//! | module | contents |
//! | --- | --- |
//! | `table` | which rows of which tensors each rank saves: a pure function of the plan |
//! | `run_state` | what is saved in addition to the tensors, and how two runs are compared |
//! | `snapshot` | a copy of a rank's part of the state, in reused buffers |
//! | `saver` | the saves of one rank, one at a time, blocking or in the background |
//! | `save_coordination` | coordinates the ranks of one save and collects their results |
//! | `cleanup` | work between two saves: deletes old checkpoints and reserves disk space |
//! | `source` | a checkpoint to resume from, of this or of another trainer |
//! | `restore` | fills an engine from a checkpoint |
//! | `saved_model` | the parameters of a checkpoint alone, for evaluation |
//! | `foreign`, `settings` | resuming from checkpoints of other trainers; how their settings differ |
//!
//! A checkpoint does not depend on units or on the world size: parameters and optimizer state are named tensors, each
//! rank writes its rows, and a reader asks for the rows that it needs. `fsdp-ckpt` implements file formats, checksums
//! and the commit.

mod cleanup;
mod disk_need;
mod foreign;
mod restore;
mod run_state;
mod save_coordination;
mod saved_model;
mod saver;
mod settings;
mod snapshot;
mod source;
mod table;

pub use disk_need::DiskNeed;
pub use foreign::{Foreign, ImportSummary};
pub use run_state::{Change, RunState, leaves};
pub use saved_model::SavedModel;
pub use saver::Saved;

pub use crate::loss_scale::LossScale;

pub(crate) use cleanup::{Cleanup, CleanupResult};
pub(crate) use foreign::other_count;
pub(crate) use restore::restore;
pub(crate) use run_state::other_run;
pub(crate) use saver::{Destination, Outcome, SaveOptions, Saver, Writer};
pub(crate) use source::{Source, has_manifest, resolve_path};
pub(crate) use table::{StateTable, state_name, state_shape};
