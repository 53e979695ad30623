//! Checks that a run's settings fit its model, before its data is read and its schedule compiled.

use fsdp_config::{LINEAR_ATTENTION, MIXTURES, Resolved};
use fsdp_nn::layer::Description;
use fsdp_nn::model::Architecture;

use crate::adapter;
use crate::error::TrainError;

/// Largest number of ranks of a run, all of which may be threads of one process. This many take 8 GiB of address space
/// for their stacks, as much again for the buffers of matrix products, and a third of the memory maps that Linux allows
/// a process.
const RANKS_MAX: usize = 4096;

/// Checks that the model supports the settings of the run file.
///
/// # Errors
/// [`TrainError::Misfit`]; [`TrainError::Data`] for a source without a share in its mix.
pub fn expect_settings(config: &Resolved, architecture: &impl Architecture) -> Result<(), TrainError> {
    expect_ranks(config)?;
    fsdp_data::expect_shares(&config.data)?;
    expect_compiled(config, architecture)?;
    expect_fit(config, architecture.description())
}

/// Checks the settings of adapters and routers against the model.
///
/// # Errors
/// [`TrainError::Misfit`].
pub(crate) fn expect_fit(config: &Resolved, model: &Description) -> Result<(), TrainError> {
    adapter::expect(config, model)?;
    expect_routers(config, model)
}

/// Checks that there are not too many ranks: they may be threads of one process, and the schedule grows with their
/// number.
///
/// # Errors
/// [`TrainError::Misfit`].
pub(crate) fn expect_ranks(config: &Resolved) -> Result<(), TrainError> {
    if config.run.ranks <= RANKS_MAX {
        return Ok(());
    }
    let reason = format!(
        "{} are too many: a run has at most {RANKS_MAX} over all its processes; choose fewer (`fsdp \
         schedule` shows the schedule and memory of larger worlds)",
        config.run.ranks
    );
    Err(TrainError::Misfit { key: "run.ranks", reason })
}

/// Checks that sequences fit into the position table of the model, if it has one.
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

/// Checks that the device has all operations of the model.
///
/// # Errors
/// [`TrainError::Misfit`] that names what it lacks.
pub(crate) fn expect_compiled(config: &Resolved, architecture: &impl Architecture) -> Result<(), TrainError> {
    let (device, model) = (config.run.device, architecture.description());
    let needed = [(MIXTURES, !model.mixtures.is_empty()), (LINEAR_ATTENTION, model.linear_attention)];
    match needed.into_iter().find(|(name, is_needed)| *is_needed && device.lacks().contains(name)) {
        None => Ok(()),
        Some((name, _)) => {
            let reason = format!("\"{}\" does not support {name}; choose another device", device.name());
            Err(TrainError::Misfit { key: "run.device", reason })
        }
    }
}

const SEQUENCE_LOSS: &str = "train.router_sequence_loss_coef";

/// Rejects losses of routers for a model without them, or with samples that are cut, and moving corrections that routers do
/// not have, or that belong to a frozen model.
fn expect_routers(config: &Resolved, model: &Description) -> Result<(), TrainError> {
    if config.train.router_bias_update_speed > 0.0 {
        let reason = match (&config.adapter, model.score_biases.is_empty()) {
            (None, false) => None,
            (Some(_), _) => Some("the routers of an adapted model are frozen; remove the key"),
            (None, true) => Some(
                "the model has no routers with corrections (`e_score_correction_bias`); remove the key, or set \
                 train.router_aux_loss_coef",
            ),
        };
        if let Some(reason) = reason.map(str::to_owned) {
            return Err(TrainError::Misfit { key: "train.router_bias_update_speed", reason });
        }
    }
    let losses = [
        ("train.router_aux_loss_coef", config.train.router_aux_loss_coef, "balance"),
        ("train.router_z_loss_coef", Some(config.train.router_z_loss_coef), "keep small"),
        (SEQUENCE_LOSS, Some(config.train.router_sequence_loss_coef), "balance"),
    ];
    for (key, _, effect) in losses.into_iter().filter(|(_, it, _)| it.is_some_and(|it| it > 0.0)) {
        let reason = if model.mixtures.is_empty() {
            format!("the model has no mixture of experts whose routers it could {effect}; remove the key")
        } else if key == SEQUENCE_LOSS && config.fsdp.chunks() > 1 {
            let (chunks, cut) = (config.fsdp.chunks(), config.fsdp.chunks_key());
            format!(
                "samples are cut into {chunks} chunks, and it needs whole ones; set {cut} = 1, or remove the key"
            )
        } else {
            continue;
        };
        return Err(TrainError::Misfit { key, reason });
    }
    Ok(())
}
