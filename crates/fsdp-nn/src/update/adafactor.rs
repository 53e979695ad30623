//! Adafactor, computed like `transformers.optimization.Adafactor`, with statistics summed over ranks.
//!
//! The second moment of a matrix is stored as running means of its rows and of its columns. Shards hold whole rows,
//! so row means are local. Column sums and the sums of squares of parameters and of updates span the ranks of a shard
//! group. They form one vector over all parameters of the model, in two phases:
//!
//! 0. sums of squares of the parameter, sum of the row means after this step, sums of columns;
//! 1. sum of squares of the update, before clipping.
//!
//! Only matrices are factored. (`transformers` also factors the last two of more dimensions; here such parameters
//! keep their full second moment.) Every rank that holds rows of a matrix keeps all its column means.

use fsdp_core::DType;
use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_core::update::{Piece, StateAxis, StatePiece, StateTensor};

use super::groups::{GroupSettings, Groups};

/// The options of [`Adafactor`]. The learning rate is passed with each step and ignored under `relative_step`.
#[derive(Clone, Debug)]
pub struct AdafactorOptions {
    /// The value added to squared gradients, and the minimum scale of a parameter.
    pub eps: (f64, f64),
    /// Root mean square above which an update is scaled down.
    pub clip_threshold: f64,
    /// Exponent of the step in the decay of running means.
    pub decay_rate: f64,
    /// Decay of the running mean of updates; `None` for no running mean.
    pub beta1: Option<f64>,
    /// Whether the learning rate is multiplied by the root mean square of the parameter.
    pub scale_parameter: bool,
    /// Whether the learning rate is derived from the step number.
    pub relative_step: bool,
    /// Whether the derived learning rate warms up.
    pub warmup_init: bool,
    /// Learning rate scales and weight decay by parameter.
    pub groups: Groups,
}

impl Default for AdafactorOptions {
    fn default() -> Self {
        Self {
            eps: (1e-30, 1e-3),
            clip_threshold: 1.0,
            decay_rate: -0.8,
            beta1: None,
            scale_parameter: true,
            relative_step: true,
            warmup_init: false,
            groups: Groups::uniform(0.0),
        }
    }
}

/// The layout of a parameter's statistics.
#[derive(Clone, Copy, Debug)]
struct ParamStatistics {
    len: usize,
    cols: Option<usize>,
    start: usize,
}

impl ParamStatistics {
    /// Number of sums in phase 0.
    fn sum_count(&self) -> usize {
        1 + self.cols.map_or(0, |cols| 1 + cols)
    }
}

/// The factors of one step of [`Adafactor`] for a parameter, except its statistics.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdafactorFactors {
    /// Number of elements of the whole parameter.
    pub len: usize,
    /// Number of columns; `None` if the parameter is not factored.
    pub cols: Option<usize>,
    /// Offset of its sums in phase 0: the sum of squares of the parameter, then, if it is factored, the sum of the row
    /// means and the sum of each column.
    pub start: usize,
    /// Decay of running means of squares.
    pub beta2: f64,
    /// Added to squares of gradients.
    pub eps: f64,
    /// Learning rate, before the multiplication by the root mean square of the parameter.
    pub rate: f64,
    /// The minimum root mean square to multiply the learning rate by; `None` if it is not multiplied.
    pub least_rms: Option<f64>,
    /// Root mean square above which an update is scaled down.
    pub clip_threshold: f64,
    /// Weight decay.
    pub decay: f64,
    /// Decay of the running mean of updates; `None` for no running mean.
    pub beta1: Option<f64>,
}

impl AdafactorFactors {
    /// Number of rows of the whole parameter; `None` if it is not factored.
    pub fn rows(&self) -> Option<usize> {
        self.cols.map(|cols| self.len / cols)
    }

    /// Returns the learning rate for a parameter with root mean square `rms`.
    pub(super) fn learning_rate(&self, rms: f64) -> f64 {
        self.least_rms.map_or(self.rate, |min_rms| self.rate * rms.max(min_rms))
    }
}

/// Adafactor. State: `exp_avg_sq_row` and `exp_avg_sq_col` of factored parameters, `exp_avg_sq` of the others, and
/// `exp_avg` if `beta1` is set.
#[derive(Clone, Debug)]
pub struct Adafactor {
    options: AdafactorOptions,
    params: Vec<ParamStatistics>,
}

impl Adafactor {
    /// Number of phases of cross-rank statistics.
    pub const PHASES: usize = 2;

    /// Creates the rule for the parameters of a model.
    pub fn new(options: AdafactorOptions, spec: &ModelSpec) -> Self {
        let mut start = 0;
        let statistics = |param: &fsdp_core::model::ParamSpec| {
            let cols = if let [_, cols] = param.shape[..] { Some(cols) } else { None };
            let statistics = ParamStatistics { len: param.len(), cols, start };
            start += statistics.sum_count();
            statistics
        };
        let params = spec.params.iter().map(statistics).collect();
        Self { options, params }
    }

    /// Returns the factors of a step of the run for a parameter.
    pub fn factors(&self, param: ParamId, step: u64, lr: f64) -> AdafactorFactors {
        let options = &self.options;
        let ParamStatistics { len, cols, start } = self.params[param.0];
        let group = options.groups.of(param);
        let GroupSettings { lr_scale, weight_decay, .. } = group;
        let step = group.own_step(step) as f64;
        let rate = if options.relative_step {
            let max_rate = if options.warmup_init { 1e-6 * step } else { 1e-2 };
            max_rate.min(1.0 / step.sqrt())
        } else {
            lr
        };
        AdafactorFactors {
            len,
            cols,
            start,
            beta2: 1.0 - step.powf(options.decay_rate),
            eps: options.eps.0,
            rate: rate * lr_scale,
            least_rms: options.scale_parameter.then_some(options.eps.1),
            clip_threshold: options.clip_threshold,
            decay: weight_decay,
            beta1: options.beta1,
        }
    }

    /// The state tensors of a shard, as [`RuleState::state`](fsdp_core::update::RuleState::state).
    pub fn state(&self, pieces: &[Piece], shard_len: usize, dtype: DType) -> Vec<StateTensor> {
        let empty = |name| StateTensor { name, len: 0, dtype, pieces: Vec::new() };
        let [mut rows, mut cols, mut full] = ["exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"].map(empty);
        for piece in pieces {
            match self.params[piece.param.0].cols {
                Some(width) => {
                    append(&mut rows, piece, StateAxis::Rows, piece.param_offset / width, piece.len / width);
                    append(&mut cols, piece, StateAxis::Columns, 0, width);
                }
                None => append(&mut full, piece, StateAxis::Elements, piece.param_offset, piece.len),
            }
        }
        let mut state = vec![rows, cols, full];
        if self.options.beta1.is_some() {
            state.push(StateTensor::elementwise("exp_avg", pieces, shard_len, dtype));
        }
        state
    }

    pub(super) fn phases(&self) -> Vec<usize> {
        let lens: [usize; Self::PHASES] =
            [self.params.iter().map(ParamStatistics::sum_count).sum(), self.params.len()];
        lens.to_vec()
    }
}

/// Appends the values of a piece to a state tensor.
fn append(tensor: &mut StateTensor, piece: &Piece, axis: StateAxis, first: usize, len: usize) {
    tensor.pieces.push(StatePiece { param: piece.param, axis, offset: tensor.len, len, first });
    tensor.len += len;
}
