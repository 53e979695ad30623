//! Merges adapters into their base: `W + scale * B A`, a few rows at a time, from files to files. `W` is what the adapters
//! were trained beside: of a quantized base, its decoded weights. With DoRA, the weights of every output are then stretched to
//! the length that was trained.
//!
//! Sums are computed in double precision and rounded once, to the dtype of the export. In bf16, with its 8 significant
//! bits, that drops changes smaller than half a unit in the last place: a merged model is only as precise as its dtype.

use std::ops::Range;
use std::path::Path;

use fsdp_ckpt::export::{ExportPlan, ExportWriter};
use fsdp_ckpt::model_files::ModelReader;
use fsdp_ckpt::safetensors::TensorType;
use fsdp_ckpt::training::ModelWeights;
use fsdp_core::model::{ModelSpec, ParamId, ParamSpec};
use fsdp_nn::layer::{Adapter, Description, Linear};
use fsdp_nn::op::{ExpertDims, Orientation};
use rayon::prelude::*;

use super::{PART_ELEMS, place_of, published};
use crate::adapter::peft;
use crate::error::TrainError;
use crate::init::{QuantizedWeight, ReadRows, row_lengths, stored_name};

/// The inputs of a merge.
#[derive(Clone, Copy, Debug)]
pub(super) struct Merge<'a> {
    /// The adapted model.
    pub(super) description: &'a Description,
    /// The files of the base.
    pub(super) base: &'a ModelWeights,
    /// The files with the adapters, those of experts one by one, and the modules that were trained whole.
    pub(super) adapter: &'a ModelReader,
    /// The dtype of the merged model.
    pub(super) dtype: TensorType,
}

impl Merge<'_> {
    /// Writes the merged model.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`]. After an error there is no file at `path`.
    pub(super) fn write(&self, path: &Path) -> Result<(), TrainError> {
        let named = base_params(self.description).map(|(_, param)| (param.fqn.clone(), param));
        let plan = ExportPlan::new(path, published(named, self.dtype), [].into())?;
        let export = plan.create()?;
        let mut writer = plan.writer();
        for (id, param) in base_params(self.description) {
            self.write_param(&mut writer, id, param)?;
        }
        Ok(export.commit([writer.finish()?])?)
    }

    fn write_param(
        &self,
        writer: &mut ExportWriter,
        id: ParamId,
        param: &ParamSpec,
    ) -> Result<(), TrainError> {
        let row_len = param.row_len().unwrap_or(1);
        let low_rank = self.low_rank(id)?;
        let of_base = |rows: Range<usize>, values: &mut [f64]| {
            Ok(self.base.read_rows_f64(stored_name(self.base, param), rows, values)?)
        };
        let matrix = self.description.quantized.get(&id);
        let quantized = matrix
            .map(|&matrix| QuantizedWeight::new(param, matrix, Some(self.base), &of_base))
            .transpose()?;
        let trained = param.trainable.then(|| peft::name(param));
        let sum = |rows: Range<usize>, values: &mut [f64]| -> Result<(), TrainError> {
            match (&trained, &quantized) {
                (Some(name), _) => self.adapter.read_rows_f64(name, rows.clone(), values)?,
                (None, Some(weight)) => weight.values(rows.clone(), values)?,
                (None, None) => of_base(rows.clone(), values)?,
            }
            if let Some(low_rank) = &low_rank {
                low_rank.add(rows.start, row_len, values);
            }
            Ok(())
        };
        let factors = low_rank.as_ref().map(|low_rank| low_rank.factors(&param.fqn, &sum)).transpose()?;
        let (tensor, begin) = place_of(param.fqn.clone(), param);
        let (rows, block) = (param.len() / row_len, (PART_ELEMS / row_len).max(1));
        for first in (0..rows).step_by(block) {
            let mut values = vec![0.0; (rows.min(first + block) - first) * row_len];
            sum(first..rows.min(first + block), &mut values)?;
            if let (Some(low_rank), Some(Some(factors))) = (&low_rank, &factors) {
                low_rank.rescale(factors, first, row_len, &mut values);
            }
            writer.write_f64(&tensor, begin + (first * row_len) as u64, &values)?;
        }
        Ok(())
    }

    /// The adapter of the linear map with this weight, if it has one.
    fn low_rank(&self, weight: ParamId) -> Result<Option<LowRank>, TrainError> {
        let Some(adapter) = self.description.adapters.get(&weight) else { return Ok(None) };
        let linear = self.description.linears.iter().find(|(_, layer)| layer.weight == weight);
        let experts = || {
            let maps = self.description.experts.iter().find(|maps| maps.weights.contains(&weight))?;
            let ExpertDims { inputs, outputs, orientation, .. } = maps.dims;
            Some(Linear { weight, bias: None, inputs, outputs, orientation })
        };
        let base = linear.map(|(_, layer)| *layer).or_else(experts).expect("linear maps are adapted");
        LowRank::read(adapter, base, &self.description.spec, self.adapter).map(Some)
    }
}

/// The parameters of the base, without those of adapters.
fn base_params(description: &Description) -> impl Iterator<Item = (ParamId, &ParamSpec)> {
    let params = description.spec.params.iter().enumerate().map(|(id, param)| (ParamId(id), param));
    params.take(description.spec.params.len() - description.added)
}

/// An adapter, in memory.
struct LowRank {
    /// `rank x inputs`.
    down: Vec<f64>,
    /// `outputs x rank`.
    up: Vec<f64>,
    /// The trained length of the weights of every output, if there is one.
    magnitude: Option<Vec<f64>>,
    adapter: Adapter,
    /// The linear map of the base.
    base: Linear,
}

impl LowRank {
    fn read(
        adapter: &Adapter,
        base: Linear,
        spec: &ModelSpec,
        reader: &ModelReader,
    ) -> Result<Self, TrainError> {
        let read = |id: ParamId| -> Result<Vec<f64>, TrainError> {
            let param = spec.param(id);
            let mut values = vec![0.0; param.len()];
            reader.read_rows_f64(&peft::name(param), 0..param.shape[0], &mut values)?;
            Ok(values)
        };
        let (down, up) = (read(adapter.down.weight)?, read(adapter.up.weight)?);
        let magnitude = adapter.magnitude.map(read).transpose()?;
        Ok(Self { down, up, magnitude, adapter: *adapter, base })
    }

    /// What the weights of every output are multiplied by, if they have a trained length, given how to read their sum with this
    /// adapter.
    fn factors(&self, name: &str, sum: &ReadRows<'_>) -> Result<Option<Vec<f64>>, TrainError> {
        let Some(magnitude) = &self.magnitude else { return Ok(None) };
        let mut lengths = vec![0.0; self.base.outputs];
        row_lengths(name, &self.base, 0..self.base.outputs, sum, &mut lengths)?;
        Ok(Some(magnitude.iter().zip(lengths).map(|(magnitude, length)| magnitude / length).collect()))
    }

    /// Multiplies rows of the weight, starting at row `first`, by the factors of their outputs.
    fn rescale(&self, factors: &[f64], first: usize, row_len: usize, values: &mut [f64]) {
        for (row, values) in values.chunks_mut(row_len).enumerate() {
            match self.base.orientation {
                Orientation::OutIn => values.iter_mut().for_each(|value| *value *= factors[first + row]),
                Orientation::InOut => {
                    values.iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor);
                }
            }
        }
    }

    /// Adds the scaled product to rows of the weight, starting at row `first`.
    fn add(&self, first: usize, row_len: usize, values: &mut [f64]) {
        let Adapter { down, scale, .. } = self.adapter;
        let (rank, inputs) = (down.outputs, down.inputs);
        values.par_chunks_mut(row_len).enumerate().for_each(|(row, values)| {
            let row = first + row;
            for r in 0..rank {
                match self.base.orientation {
                    Orientation::OutIn => {
                        let b = scale * self.up[row * rank + r];
                        let a = &self.down[r * inputs..][..inputs];
                        values.iter_mut().zip(a).for_each(|(value, a)| *value += b * a);
                    }
                    Orientation::InOut => {
                        let a = scale * self.down[r * inputs + row];
                        let b = self.up.iter().skip(r).step_by(rank);
                        values.iter_mut().zip(b).for_each(|(value, b)| *value += a * b);
                    }
                }
            }
        });
    }
}
