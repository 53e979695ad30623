//! The ranks that are measured.

use fsdp_comm::launch::{Launcher, Seat};
use fsdp_comm::process::cluster::Cluster;
use fsdp_config::RunConfig;
use fsdp_nn::Backend;
use fsdp_train::TrainError;

use crate::device::clock::Clock;
use crate::device::{self, Purpose, Work};
use crate::error::CliError;

/// Provides ranks.
pub(super) trait Ranks {
    /// Runs work on the ranks of a run.
    ///
    /// # Errors
    /// [`CliError`]: the device is not available.
    fn run<W: Work>(&self, run: &RunConfig, work: W) -> Result<W::Outcome, CliError>;
}

/// The ranks of the run, or those of this process if there are several.
impl Ranks for Option<&Cluster> {
    fn run<W: Work>(&self, run: &RunConfig, work: W) -> Result<W::Outcome, CliError> {
        device::on(run, Purpose::Training, *self, work)
    }
}

/// The device name of the first rank of a run; `None` on the host.
///
/// # Errors
/// [`CliError`]: the device is not available.
pub(super) fn device_name(run: &RunConfig, runner: &impl Ranks) -> Result<Option<String>, CliError> {
    let names = runner.run(run, Name { ranks: run.ranks })??;
    Ok(names.into_iter().next().flatten())
}

/// Queries the device names of all ranks.
struct Name {
    ranks: usize,
}

impl Work for Name {
    type Outcome = Result<Vec<Option<String>>, TrainError>;

    fn on<L: Launcher>(self, launcher: &L) -> Self::Outcome
    where
        L::Memory: Backend + Clock,
    {
        let name = |seat: Seat<L::Memory>| Ok::<_, TrainError>(seat.memory.device_name());
        Ok(launcher.launch(self.ranks, &name)?)
    }
}
