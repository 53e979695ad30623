//! Exports a trained model as a Hugging Face directory. Every rank of the first replica writes its own rows in
//! place; no rank holds more than one piece.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use fsdp_ckpt::conversion::{Conversion, Target, convert};
use fsdp_ckpt::export::{ExportPlan, Receipt};
use fsdp_ckpt::formats;
use fsdp_ckpt::safetensors::{TensorSpec, TensorType};
use fsdp_ckpt::transfer::{NoProgress, Options};
use fsdp_core::engine::Engine;
use fsdp_core::memory::{HostSliceMut, Slice};
use fsdp_core::model::ModelSpec;
use fsdp_core::program::Program;
use fsdp_core::{DType, Memory, Queue};

use crate::error::TrainError;

/// The plan of an export to `path` in `dtype`: every parameter once, under its first name.
///
/// # Errors
/// [`TrainError::Checkpoint`].
pub(crate) fn plan_export(path: &Path, spec: &ModelSpec, dtype: DType) -> Result<ExportPlan, TrainError> {
    let dtype = match dtype {
        DType::F64 => TensorType::F64,
        DType::Bf16 => TensorType::Bf16,
        _ => TensorType::F32,
    };
    let tensors = spec
        .params
        .iter()
        .map(|param| TensorSpec { name: param.fqn.clone(), dtype, shape: param.shape.clone() })
        .collect();
    Ok(ExportPlan::new(path, tensors, BTreeMap::new())?)
}

/// Exports the model of a checkpoint to an object store, in the place of one that is there.
///
/// # Errors
/// [`TrainError::Checkpoint`].
pub(crate) fn export_checkpoint(checkpoint: &Path, model: &Path) -> Result<(), TrainError> {
    let checkpoint = formats::native::open(checkpoint)?;
    let conversion = Conversion { replaces: true, ..Conversion::new(Target::Safetensors) };
    let cancel = AtomicBool::new(false);
    convert(&checkpoint, model, &conversion, &Options::new(&NoProgress, &cancel))?;
    Ok(())
}

/// Writes this rank's rows of all parameters; ranks of later replicas have nothing to write.
///
/// # Errors
/// [`TrainError::Checkpoint`], or those of the memory.
pub fn export_model<M: Memory, P: Program<M>>(
    engine: &Engine<M, P>,
    plan: &ExportPlan,
) -> Result<Option<Receipt>, TrainError> {
    if engine.plan().mesh.replica_of(engine.rank()) > 0 {
        return Ok(None);
    }
    let mut writer = plan.writer();
    let mut values = Vec::new();
    for unit in engine.plan().layout.unit_ids() {
        let shards = engine.shards(unit);
        for (buffer, pieces) in shards.params.into_iter().zip(shards.pieces) {
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
