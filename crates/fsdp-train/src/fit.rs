//! Whether a run can have the settings of its file with its model: asked before its data is read and its schedule made.

use fsdp_nn::layer::Description;
use fsdp_nn::model::Architecture;

use crate::adapter;
use crate::config::{Device, Resolved};
use crate::data;
use crate::error::TrainError;

/// The most ranks of a run, which are threads of one process. As many take 8 GiB of address space for their stacks, as much
/// again for the buffers of matrix products, and a third of the memory maps that Linux gives a process.
const RANKS_MAX: usize = 4096;

/// That a run can be trained with the settings of its file and a model.
///
/// # Errors
/// [`TrainError::Misfit`]; [`TrainError::Data`] for a source without a share of its mix.
pub fn expect_settings(config: &Resolved, architecture: &impl Architecture) -> Result<(), TrainError> {
    expect_ranks(config)?;
    data::expect_shares(&config.data)?;
    expect_compiled(config, architecture)?;
    expect_fit(config, architecture.description())
}

/// That a model has what the settings of adapters and routers are about.
///
/// # Errors
/// [`TrainError::Misfit`].
pub(crate) fn expect_fit(config: &Resolved, model: &Description) -> Result<(), TrainError> {
    adapter::expect(config, model)?;
    expect_routers(config, model)
}

/// That the ranks of a run can be threads of one process: the size of its schedule grows with them.
///
/// # Errors
/// [`TrainError::Misfit`].
pub(crate) fn expect_ranks(config: &Resolved) -> Result<(), TrainError> {
    if config.run.ranks <= RANKS_MAX {
        return Ok(());
    }
    let reason = format!(
        "{} are too many: ranks are threads of one process, at most {RANKS_MAX}; choose fewer (`fsdp schedule` shows the \
         schedule and memory of larger worlds)",
        config.run.ranks
    );
    Err(TrainError::Misfit { key: "run.ranks", reason })
}

/// That sequences are no longer than the position table of a model, if it has one.
///
/// # Errors
/// [`TrainError::Misfit`].
pub fn expect_positions(config: &Resolved, architecture: &impl Architecture) -> Result<(), TrainError> {
    let seq_len = config.data.seq_len;
    let Some(positions) = architecture.positions_max().filter(|&positions| seq_len > positions) else {
        return Ok(());
    };
    let reason = format!("{seq_len} is more than the model's {positions} positions; choose a shorter one");
    Err(TrainError::Misfit { key: "data.seq_len", reason })
}

/// That programs of XLA have all operations of a model, if they are to run it.
///
/// # Errors
/// [`TrainError::Misfit`]: it is a mixture of experts.
pub(crate) fn expect_compiled(config: &Resolved, architecture: &impl Architecture) -> Result<(), TrainError> {
    if config.run.device != Device::Xla || architecture.description().mixtures.is_empty() {
        return Ok(());
    }
    let reason = "\"xla\" has no mixtures of experts; choose another device".to_owned();
    Err(TrainError::Misfit { key: "run.device", reason })
}

/// Refuses a balancing loss where there is nothing to balance.
fn expect_routers(config: &Resolved, model: &Description) -> Result<(), TrainError> {
    match config.train.router_aux_loss_coef {
        Some(coefficient) if coefficient > 0.0 && model.mixtures.is_empty() => {
            let reason = "the model has no mixture of experts whose routers it could balance; remove the key"
                .to_owned();
            Err(TrainError::Misfit { key: "train.router_aux_loss_coef", reason })
        }
        _ => Ok(()),
    }
}
