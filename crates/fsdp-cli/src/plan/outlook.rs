//! What is predicted of a run.

use super::ahead::{Forecaster, RunForecast};
use super::cost::Cost;
use super::effects::Effect;

/// All predictions of a run.
pub(super) struct Outlook<'a> {
    pub(super) forecaster: &'a Forecaster<'a>,
    pub(super) run: RunForecast<'a>,
    pub(super) cost: Cost,
    /// Seconds of a step of PyTorch's FSDP2, compiled and not, if they can be predicted.
    pub(super) fsdp2: Option<[f64; 2]>,
    /// Executed product FLOPs, as a multiple of those without checkpointing.
    pub(super) recompute_factor: f64,
    /// The effects of other settings.
    pub(super) effects: Vec<Effect>,
}
