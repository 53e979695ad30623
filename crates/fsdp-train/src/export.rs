//! Exports a trained model as a Hugging Face directory. Every rank of the first replica writes its own rows in
//! place; no rank holds more than one piece.

mod companions;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use fsdp_ckpt::conversion::{Conversion, Target, convert};
use fsdp_ckpt::export::{ExportPlan, Receipt};
use fsdp_ckpt::formats;
use fsdp_ckpt::safetensors::{TensorSpec, TensorType};
use fsdp_ckpt::transfer::{NoProgress, Options};
use fsdp_core::engine::{Engine, UnitShards};
use fsdp_core::memory::{HostSliceMut, Slice};
use fsdp_core::program::Program;
use fsdp_core::{DType, Memory, Queue};
use fsdp_nn::update::Ema;

use crate::checkpoint::RunState;
use crate::config::ExportWeights;
use crate::error::TrainError;
use crate::job::Job;

pub(crate) use companions::Companions;

/// What the exported files say of where they come from.
fn origin<A>(job: &Job<A>, config_json: Option<&str>) -> BTreeMap<String, String> {
    let run = RunState::of(job, 0, config_json, &[]).run_hash();
    BTreeMap::from([("fsdp_version".to_owned(), crate::VERSION.to_owned()), ("fsdp_run".to_owned(), run)])
}

impl<A> Job<A> {
    /// The dtype of the exported model: that of the run file, else that of the files of the base, else that of the
    /// parameters. A base in half precision is no model for it: what is trained may not fit its range.
    pub fn export_dtype(&self) -> DType {
        let base = || match self.init.dtype() {
            Some(TensorType::Bf16) => Some(DType::Bf16),
            Some(TensorType::F32) => Some(DType::F32),
            Some(TensorType::F64) => Some(DType::F64),
            _ => None,
        };
        let chosen = self.config.run.export_dtype.or_else(base);
        chosen.unwrap_or_else(|| self.plan.policy.param_dtype.master())
    }
}

fn tensor_type(dtype: DType) -> TensorType {
    match dtype {
        DType::F64 => TensorType::F64,
        DType::Bf16 => TensorType::Bf16,
        _ => TensorType::F32,
    }
}

/// The plan of an export to `path`: every parameter once, under its first name.
///
/// # Errors
/// [`TrainError::Checkpoint`].
pub(crate) fn plan_export<A>(
    path: &Path,
    job: &Job<A>,
    config_json: Option<&str>,
) -> Result<ExportPlan, TrainError> {
    let dtype = tensor_type(job.export_dtype());
    let tensors = job
        .plan
        .spec
        .params
        .iter()
        .map(|param| TensorSpec { name: param.fqn.clone(), dtype, shape: param.shape.clone() })
        .collect();
    Ok(ExportPlan::new(path, tensors, origin(job, config_json))?)
}

/// Exports the model of a checkpoint to an object store, in the place of one that is there.
///
/// # Errors
/// [`TrainError::Checkpoint`].
pub(crate) fn export_checkpoint<A>(
    checkpoint: &Path,
    model: &Path,
    job: &Job<A>,
    config_json: Option<&str>,
) -> Result<(), TrainError> {
    let checkpoint = formats::native::open(checkpoint)?;
    let conversion = Conversion {
        replaces: true,
        dtype: Some(tensor_type(job.export_dtype())),
        metadata: origin(job, config_json),
        ..Conversion::new(Target::Safetensors)
    };
    let cancel = AtomicBool::new(false);
    convert(&checkpoint, model, &conversion, &Options::new(&NoProgress, &cancel))?;
    Ok(())
}

/// Writes this rank's rows of all parameters, or of their averages where they have some; ranks of later replicas have nothing
/// to write.
///
/// # Errors
/// [`TrainError::Checkpoint`], or those of the memory.
pub fn export_model<M: Memory, P: Program<M>>(
    engine: &Engine<M, P>,
    plan: &ExportPlan,
    weights: ExportWeights,
) -> Result<Option<Receipt>, TrainError> {
    if engine.plan().mesh.replica_of(engine.rank()) > 0 {
        return Ok(None);
    }
    let mut writer = plan.writer();
    let mut values = Vec::new();
    for unit in engine.plan().layout.unit_ids() {
        let shards = engine.shards(unit);
        for (segment, (params, pieces)) in shards.params.iter().zip(shards.pieces).enumerate() {
            let averages = if weights == ExportWeights::Ema { average(&shards, segment) } else { None };
            let buffer = averages.unwrap_or(params);
            for piece in pieces {
                values.clear();
                values.resize(piece.len, 0.0);
                let slice = Slice::new(buffer, piece.offset, piece.len);
                engine.memory().read(Queue::Compute, slice, HostSliceMut::F64(&mut values))?;
                let name = &engine.plan().spec.param(piece.param).fqn;
                writer.write_rows_f64(name, piece.param_offset / piece.row_len, &values)?;
            }
        }
    }
    Ok(Some(writer.finish()?))
}

/// The averages of a segment's parameters, in their order; frozen ones have none.
fn average<'a, B>(shards: &UnitShards<'a, B>, segment: usize) -> Option<&'a B> {
    let tensors = shards.state_tensors.get(segment)?;
    let index = tensors.iter().position(|tensor| tensor.name == Ema::STATE)?;
    Some(shards.state[segment][index])
}
