//! A training state that is read by rows: weights and moments of one checkpoint.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::AtomicBool;

use fsdp_ckpt::safetensors::TensorType;
use fsdp_ckpt::training::StateRows;
use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_core::update::Piece;

use crate::checkpoint::Foreign;
use crate::error::TrainError;
use crate::init::InitSource;

/// Elements that are read at a time.
pub(super) const BLOCK_ELEMS: usize = 1 << 20;

/// The name of a parameter itself, beside those of its states.
pub(super) const WEIGHT: &str = "";

/// Values in memory, by parameter and state.
pub(super) type Held = BTreeMap<(ParamId, &'static str), Vec<f64>>;

/// An open checkpoint, in the terms of the model.
pub(super) struct State<'a> {
    /// `None` if all values are held.
    saved: Option<Saved<'a>>,
    /// Values that are read in place of those of the checkpoint.
    pub(super) held: Held,
    spec: &'a ModelSpec,
    /// Takes back the update of an element, given its parameter, value and moments.
    pub(super) undo: Option<Undo>,
}

struct Saved<'a> {
    foreign: &'a Foreign,
    rows: StateRows<'a>,
    init: &'a InitSource,
}

/// The value before an update, from the parameter's id, and the value and the moments after it.
pub(super) type Undo = Box<dyn Fn(ParamId, f64, [f64; 2]) -> f64>;

impl<'a> State<'a> {
    pub(super) fn open(
        foreign: &'a Foreign,
        init: &'a InitSource,
        spec: &'a ModelSpec,
        stop: &'a AtomicBool,
    ) -> Result<Self, TrainError> {
        let saved = Saved { foreign, rows: foreign.rows(stop)?, init };
        Ok(Self { saved: Some(saved), ..Self::held(spec, Held::new()) })
    }

    /// A state in memory, in `f32`.
    pub(super) fn held(spec: &'a ModelSpec, held: Held) -> Self {
        Self { saved: None, held, spec, undo: None }
    }

    /// Reads rows of a parameter, of which a vector has one per element.
    pub(super) fn param(&mut self, id: ParamId, rows: Range<usize>) -> Result<Vec<f64>, TrainError> {
        let row_len = self.spec.param(id).row_len().unwrap_or(1);
        let mut values = vec![0.0; rows.len() * row_len];
        if let Some(held) = self.held.get(&(id, WEIGHT)) {
            values.copy_from_slice(&held[rows.start * row_len..rows.end * row_len]);
        } else if let Some(Saved { foreign, rows: reader, init }) = &mut self.saved {
            match foreign.weight(id) {
                Some((name, _)) => {
                    reader.read_rows_f64(name, rows.clone(), &mut values)?;
                    expect_finite(foreign, name, &values)?;
                }
                None => {
                    let (param_offset, len) = (rows.start * row_len, values.len());
                    let piece = Piece { param: id, offset: 0, len, param_offset, row_len };
                    init.fill(self.spec, &piece, &mut values)?;
                }
            }
        }
        if let Some(undo) = self.undo.take().filter(|_| self.spec.param(id).trainable) {
            let first = self.moment(id, "exp_avg", rows.clone())?;
            let second = self.moment(id, "exp_avg_sq", rows)?;
            for (value, moments) in values.iter_mut().zip(first.into_iter().zip(second)) {
                *value = undo(id, *value, [moments.0, moments.1]);
            }
            self.undo = Some(undo);
        }
        Ok(values)
    }

    /// Reads rows of a state of a parameter; zeros if the optimizer has none.
    pub(super) fn moment(
        &mut self,
        id: ParamId,
        state: &'static str,
        rows: Range<usize>,
    ) -> Result<Vec<f64>, TrainError> {
        let row_len = self.spec.param(id).row_len().unwrap_or(1);
        let mut values = vec![0.0; rows.len() * row_len];
        if let Some(held) = self.held.get(&(id, state)) {
            values.copy_from_slice(&held[rows.start * row_len..rows.end * row_len]);
        } else if let Some(Saved { foreign, rows: reader, .. }) = &mut self.saved
            && let Some((name, _)) = foreign.state(id, state).or_else(|| foreign.other_state(id, state))
        {
            reader.read_rows_f64(name, rows, &mut values)?;
            expect_finite(foreign, name, &values)?;
        }
        Ok(values)
    }

    /// Whether the optimizer has a state of a parameter, be it one that the rule of the run file does not have.
    pub(super) fn has(&self, id: ParamId, state: &'static str) -> bool {
        let in_file = |saved: &Saved<'_>| {
            saved.foreign.state(id, state).or_else(|| saved.foreign.other_state(id, state)).is_some()
        };
        self.held.contains_key(&(id, state)) || self.saved.as_ref().is_some_and(in_file)
    }

    /// The dtype of the tensor with a parameter.
    pub(super) fn param_dtype(&self, id: ParamId) -> TensorType {
        let saved = self.saved.as_ref().and_then(|saved| saved.foreign.weight(id));
        saved.map_or(TensorType::F32, |(_, dtype)| dtype)
    }

    /// The dtype of the tensor with a state.
    pub(super) fn moment_dtype(&self, id: ParamId, state: &str) -> TensorType {
        let saved = self.saved.as_ref().and_then(|saved| saved.foreign.state(id, state));
        saved.map_or(TensorType::F32, |(_, dtype)| dtype)
    }

    /// Half of the distance between neighboring numbers near 1 in the dtype of the parameter's tensor.
    pub(super) fn param_rounding(&self, id: ParamId) -> f64 {
        rounding(self.param_dtype(id))
    }

    /// The same for a state.
    pub(super) fn moment_rounding(&self, id: ParamId, state: &str) -> f64 {
        rounding(self.moment_dtype(id, state))
    }
}

fn expect_finite(foreign: &Foreign, name: &str, values: &[f64]) -> Result<(), TrainError> {
    match values.iter().all(|value| value.is_finite()) {
        true => Ok(()),
        false => Err(TrainError::Input(format!(
            "{}: {name} has values that are not finite (NaN or infinite), so the step cannot be judged; look at them with \
             `fsdp ckpt inspect`",
            foreign.path().display()
        ))),
    }
}

/// The rows of a parameter, in blocks of a bounded number of elements.
pub(super) fn blocks(spec: &ModelSpec, id: ParamId) -> impl Iterator<Item = Range<usize>> + use<> {
    let (param, row_len) = (spec.param(id), spec.param(id).row_len().unwrap_or(1));
    let (rows, step) = (param.len() / row_len.max(1), (BLOCK_ELEMS / row_len.max(1)).max(1));
    (0..rows).step_by(step).map(move |first| first..rows.min(first + step))
}

/// The largest relative error of rounding to a dtype.
pub(super) fn rounding(dtype: TensorType) -> f64 {
    match dtype {
        TensorType::F64 => f64::EPSILON / 2.0,
        TensorType::Bf16 => 2f64.powi(-8),
        TensorType::F16 => 2f64.powi(-11),
        _ => f64::from(f32::EPSILON) / 2.0,
    }
}
