//! Merges adapters into their base: `W + scale * B A`, a few rows at a time, from files to files. `W` is what the adapters
//! were trained beside: of a quantized base, its decoded weights.
//!
//! Sums are computed in double precision and rounded once, to the dtype of the export. In bf16, with its 8 significant
//! bits, that drops changes smaller than half a unit in the last place: a merged model is only as precise as its dtype.

use std::ops::Range;
use std::path::Path;

use fsdp_ckpt::export::ExportPlan;
use fsdp_ckpt::model_files::ModelReader;
use fsdp_ckpt::safetensors::TensorType;
use fsdp_ckpt::training::ModelWeights;
use fsdp_core::model::{ModelSpec, ParamId, ParamSpec};
use fsdp_nn::layer::{Adapter, Description};
use fsdp_nn::op::Orientation;
use rayon::prelude::*;

use super::{place_of, published};
use crate::adapter::peft;
use crate::error::TrainError;
use crate::init::{QuantizedWeight, stored_name};

/// Elements of a parameter to merge at a time.
const PART_ELEMS: usize = 1 << 22;

/// The inputs of a merge.
#[derive(Clone, Copy, Debug)]
pub(super) struct Merge<'a> {
    /// The adapted model.
    pub(super) description: &'a Description,
    /// The files of the base.
    pub(super) base: &'a ModelWeights,
    /// The files with the adapters and the modules that were trained whole.
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
        let spec = &self.description.spec;
        let named = base_params(self.description).map(|(_, param)| (param.fqn.clone(), param));
        let plan = ExportPlan::new(path, published(named, self.dtype), [].into())?;
        let export = plan.create()?;
        let mut writer = plan.writer();
        for (id, param) in base_params(self.description) {
            let row_len = param.row_len().unwrap_or(1);
            let rows = param.len() / row_len;
            let low_rank = match self.description.adapters.get(&id) {
                Some(adapter) => {
                    let base = self.description.linears.iter().find(|(_, layer)| layer.weight == id);
                    let (_, base) = base.expect("linear maps are adapted");
                    Some(LowRank::read(adapter, base.orientation, spec, self.adapter)?)
                }
                None => None,
            };
            let of_base = |rows: Range<usize>, values: &mut [f64]| {
                Ok(self.base.read_rows_f64(stored_name(self.base, param), rows, values)?)
            };
            let matrix = self.description.quantized.get(&id);
            let quantized = matrix
                .map(|&matrix| QuantizedWeight::new(param, matrix, Some(self.base), &of_base))
                .transpose()?;
            let block = (PART_ELEMS / row_len).max(1);
            for first in (0..rows).step_by(block) {
                let rows = first..rows.min(first + block);
                let mut values = vec![0.0; rows.len() * row_len];
                match (peft::names(param).next().filter(|_| param.trainable), &quantized) {
                    (Some(name), _) => self.adapter.read_rows_f64(&name, rows, &mut values)?,
                    (None, Some(weight)) => weight.values(rows, &mut values)?,
                    (None, None) => of_base(rows, &mut values)?,
                }
                if let Some(low_rank) = &low_rank {
                    low_rank.add(first, row_len, &mut values);
                }
                let (tensor, begin) = place_of(param.fqn.clone(), param);
                writer.write_f64(&tensor, begin + (first * row_len) as u64, &values)?;
            }
        }
        Ok(export.commit([writer.finish()?])?)
    }
}

/// The parameters of the base, without those of adapters.
fn base_params(description: &Description) -> impl Iterator<Item = (ParamId, &ParamSpec)> {
    let is_added = |id: ParamId| {
        description.adapters.values().any(|adapter| adapter.down.weight == id || adapter.up.weight == id)
    };
    let params = description.spec.params.iter().enumerate().map(|(id, param)| (ParamId(id), param));
    params.filter(move |(id, _)| !is_added(*id))
}

/// The two matrices of an adapter, in memory.
struct LowRank {
    /// `rank x inputs`.
    down: Vec<f64>,
    /// `outputs x rank`.
    up: Vec<f64>,
    adapter: Adapter,
    /// How the base stores its weight.
    orientation: Orientation,
}

impl LowRank {
    fn read(
        adapter: &Adapter,
        orientation: Orientation,
        spec: &ModelSpec,
        reader: &ModelReader,
    ) -> Result<Self, TrainError> {
        let read = |id: ParamId| -> Result<Vec<f64>, TrainError> {
            let param = spec.param(id);
            let mut values = vec![0.0; param.len()];
            let name = peft::names(param).next().expect("a parameter has a name");
            reader.read_rows_f64(&name, 0..param.shape[0], &mut values)?;
            Ok(values)
        };
        let (down, up) = (read(adapter.down.weight)?, read(adapter.up.weight)?);
        Ok(Self { down, up, adapter: *adapter, orientation })
    }

    /// Adds the scaled product to rows of the weight, starting at row `first`.
    fn add(&self, first: usize, row_len: usize, values: &mut [f64]) {
        let Adapter { down, scale, .. } = self.adapter;
        let (rank, inputs) = (down.outputs, down.inputs);
        values.par_chunks_mut(row_len).enumerate().for_each(|(row, values)| {
            let row = first + row;
            for r in 0..rank {
                match self.orientation {
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
