//! Checkpoints of a run: which rank saves what, when, and how a run resumes.
//!
//! | module | contents |
//! | --- | --- |
//! | `table` | which rows of which tensors each rank saves: a pure function of the plan |
//! | `run_state` | what is saved in addition to the tensors, and how two runs are compared |
//! | `snapshot` | a copy of a rank's part of the state, in reused buffers |
//! | `saver` | the saves of one rank, one at a time, blocking or in the background |
//! | `save_coordination` | coordinates the ranks of one save and collects their results |
//! | `cleanup` | work between two saves: deletes old checkpoints and reserves disk space |
//! | `start` | where a run begins, and what happens to its output folder |
//! | `source` | a checkpoint to resume from, of this or of another trainer |
//! | `folder` | the content of an output folder before a run begins |
//! | `soundness` | whether checkpoints can be read completely, and the newest that can |
//! | `warning` | warnings that do not end a run |
//! | `restore` | fills an engine from a checkpoint |
//! | `saved_model` | the parameters of a checkpoint alone, for evaluation |
//! | `foreign`, `settings` | resuming from checkpoints of other trainers; how their settings differ |
//!
//! A checkpoint does not depend on units or on the world size: parameters and optimizer state are named tensors, each
//! rank writes its rows, and a reader asks for the rows that it needs. `fsdp-ckpt` implements file formats, checksums
//! and the commit.

mod base;
mod cleanup;
mod disk_need;
mod folder;
mod foreign;
mod restore;
mod run_state;
mod save_coordination;
mod saved_model;
mod saver;
mod settings;
mod snapshot;
mod soundness;
mod source;
mod start;
mod table;
mod warning;

pub use base::base_of;
pub use disk_need::DiskNeed;
pub use folder::{is_filled, is_output};
pub use foreign::{Foreign, ImportSummary};
pub use run_state::{Change, Difference, RunState};
pub use save_coordination::SaveFailure;
pub use saved_model::SavedModel;
pub use saver::Saved;
pub use start::{Resume, Resumed};
pub use warning::RunWarning;

pub use crate::loss_scale::LossScale;

pub(crate) use cleanup::{Cleanup, CleanupResult};
pub(crate) use folder::RESOLVED;
pub(crate) use restore::restore;
pub(crate) use save_coordination::{Outcome, assembly_error};
pub(crate) use saver::{Destination, SaveOptions, Saver, Writer};
pub(crate) use source::Source;
pub(crate) use start::Start;
pub(crate) use table::{StateTable, state_name, state_shape};
