//! Checkpoints of a run: what of its state is saved by whom, when, and how a run goes on from one.
//!
//! | module | what |
//! | --- | --- |
//! | `table` | which rows of which tensors each rank saves: a pure function of the plan |
//! | `run_state` | what is saved beside the tensors, and how two runs are compared |
//! | `snapshot` | a copy of a rank's part of the state, in reused buffers |
//! | `saver` | one rank's saves, one at a time, in the step or behind it |
//! | `meeting` | where the ranks bring a save together, and learn how it ended |
//! | `tidying` | what is done between two saves: old checkpoints go, disk space is set aside |
//! | `start` | where a run begins, and what becomes of its output folder |
//! | `source` | a checkpoint that a run can go on from, whoever saved it |
//! | `folder` | what an output folder holds before a run begins |
//! | `soundness` | whether checkpoints can be read whole, and which is the newest that can |
//! | `warning` | what a user should know and a run goes on with |
//! | `restore` | filling an engine from a checkpoint |
//! | `saved_model` | the parameters of a checkpoint by themselves, to be evaluated |
//! | `foreign`, `settings` | going on from what another trainer has saved; how its settings differ |
//!
//! A checkpoint knows no units and no world: parameters and optimizer state are tensors by name, each rank
//! holds rows of them, and whoever reads asks for rows. File formats, checksums and the commit are
//! `fsdp-ckpt`.

mod disk_need;
mod folder;
mod foreign;
mod meeting;
mod restore;
mod run_state;
mod saved_model;
mod saver;
mod settings;
mod snapshot;
mod soundness;
mod source;
mod start;
mod table;
mod tidying;
mod warning;

pub use disk_need::DiskNeed;
pub use folder::{is_filled, is_output};
pub use foreign::{Foreign, Taken};
pub use meeting::SaveFailure;
pub use run_state::{Change, DataPosition, Difference, RunState};
pub use saved_model::SavedModel;
pub use saver::Saved;
pub use start::{Resume, Resumed};
pub use warning::RunWarning;

pub use crate::loss_scale::LossScale;

pub(crate) use meeting::{Outcome, not_heard};
pub(crate) use restore::restore;
pub(crate) use saver::{Place, SaveOptions, Saver};
pub(crate) use source::Source;
pub(crate) use start::Start;
pub(crate) use table::{StateTable, state_name, state_shape};
pub(crate) use tidying::{Tidied, Tidying};
