//! The ranks that are measured.

use fsdp_comm::launch::{Launcher, Seat};
use fsdp_comm::process::cluster::Cluster;
use fsdp_train::config::RunConfig;
use fsdp_train::{TrainBackend, TrainError};

use crate::clock::Clock;
use crate::device::{self, Work};
use crate::error::CliError;

/// What has ranks.
pub(super) trait Ranks {
    /// Does work with those of a run.
    ///
    /// # Errors
    /// [`CliError`]: the device is not there.
    fn run<W: Work>(&self, run: &RunConfig, work: W) -> Result<W::Outcome, CliError>;
}

/// Those that the run names, or of this process, where there are several.
impl Ranks for Option<&Cluster> {
    fn run<W: Work>(&self, run: &RunConfig, work: W) -> Result<W::Outcome, CliError> {
        device::training(run, *self, work)
    }
}

/// What the device of the first rank of a run calls itself; the host has no name.
///
/// # Errors
/// [`CliError`]: the device is not there.
pub(super) fn device_name(run: &RunConfig, on: &impl Ranks) -> Result<Option<String>, CliError> {
    let names = on.run(run, Name { ranks: run.ranks })??;
    Ok(names.into_iter().next().flatten())
}

/// What the devices of ranks call themselves.
struct Name {
    ranks: usize,
}

impl Work for Name {
    type Outcome = Result<Vec<Option<String>>, TrainError>;

    fn on<L: Launcher>(self, launcher: &L) -> Self::Outcome
    where
        L::Memory: TrainBackend + Clock,
    {
        let name = |seat: Seat<L::Memory>| Ok::<_, TrainError>(seat.memory.device_name());
        Ok(launcher.launch(self.ranks, &name)?)
    }
}
