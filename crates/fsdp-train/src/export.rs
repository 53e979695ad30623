//! Exports a trained model as a Hugging Face directory. Every rank of the first replica writes its own rows in place;
//! no rank holds more than one piece in memory.

mod companions;
mod merge;
mod stack;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use fsdp_ckpt::checkpoint::{StackPlace, published_stack};
use fsdp_ckpt::conversion::{Conversion, Target, convert};
use fsdp_ckpt::export::{ExportPlan, Receipt};
use fsdp_ckpt::formats;
use fsdp_ckpt::model_files::ModelReader;
use fsdp_ckpt::safetensors::{TensorSpec, TensorType};
use fsdp_ckpt::transfer::{NoProgress, Options};
use fsdp_config::{ExportWeights, OptimizerConfig, Resolved};
use fsdp_core::engine::{Engine, UnitShards};
use fsdp_core::memory::{HostSliceMut, Slice};
use fsdp_core::model::ParamSpec;
use fsdp_core::program::Program;
use fsdp_core::{Axis, DType, Memory, Queue};
use fsdp_nn::model::Architecture;
use fsdp_nn::update::Ema;

use crate::adapter::exported_names;
use crate::checkpoint::RunState;
use crate::error::TrainError;
use crate::job::Job;

pub(crate) use companions::Companions;
use merge::Merge;

/// Elements of a parameter that are read at a time.
const PART_ELEMS: usize = 1 << 22;

/// Metadata of exported files: the version of `fsdp` and the digest of the run.
fn origin<A>(job: &Job<A>, config_json: Option<&str>) -> BTreeMap<String, String> {
    let run = RunState::of(job, 0, config_json, (&[], &[])).run_hash();
    BTreeMap::from([("fsdp_version".to_owned(), crate::VERSION.to_owned()), ("fsdp_run".to_owned(), run)])
}

impl<A> Job<A> {
    /// The dtype of the exported model: that of the run file, else that of the base's files, else that of the master
    /// parameters. An f16 base is not followed, since trained values may exceed its range.
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
        DType::F16 => TensorType::F16,
        _ => TensorType::F32,
    }
}

/// Plans an export to `path`: every parameter once, under its first name; with an adapter, only the trained parameters.
///
/// # Errors
/// [`TrainError::Checkpoint`].
pub(crate) fn plan_export<A>(
    path: &Path,
    job: &Job<A>,
    config_json: Option<&str>,
) -> Result<ExportPlan, TrainError> {
    let adapter = job.config.adapter.as_ref();
    let dtype = match adapter {
        None => job.export_dtype(),
        // Trained parameters keep the dtype of their masters, whatever the dtype of the base.
        Some(_) => job.config.run.export_dtype.unwrap_or(job.plan.policy.param_dtype.master()),
    };
    let params = job.plan.spec.params.iter();
    let named =
        params.flat_map(|param| exported_names(adapter, param).into_iter().map(move |name| (name, param)));
    let tensors = published(named, tensor_type(dtype));
    Ok(ExportPlan::new(path, tensors, origin(job, config_json))?)
}

/// The tensors of files that hold parameters under these names: themselves, or stacks of those of all experts.
fn published<'a>(
    params: impl Iterator<Item = (String, &'a ParamSpec)>,
    dtype: TensorType,
) -> Vec<TensorSpec> {
    let mut tensors: Vec<TensorSpec> = Vec::new();
    let mut stacks: BTreeMap<String, usize> = BTreeMap::new();
    for (name, param) in params {
        let mut shape = param.shape.clone();
        let Some(StackPlace { stack: name, place, slots }) = published_stack(&name) else {
            tensors.push(TensorSpec { name, dtype, shape });
            continue;
        };
        let stack = *stacks.entry(name.clone()).or_insert_with(|| {
            shape[0] *= slots;
            tensors.push(TensorSpec { name, dtype, shape: [vec![0], shape].concat() });
            tensors.len() - 1
        });
        let experts = &mut tensors[stack].shape[0];
        *experts = (*experts).max(place as usize / slots + 1);
    }
    tensors
}

/// The tensor of files that holds a parameter under this name, and the parameter's first element in it.
fn place_of(name: String, param: &ParamSpec) -> (String, u64) {
    match published_stack(&name) {
        Some(StackPlace { stack, place, .. }) => (stack, place * param.len() as u64),
        None => (name, 0),
    }
}

/// Exports the model of a checkpoint to an object store, replacing an existing one.
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

/// Writes exported adapters as PEFT has them, where those of experts are stacked.
///
/// # Errors
/// [`TrainError::Checkpoint`].
pub(crate) fn export_stacked<A>(
    job: &Job<A>,
    exported: &Path,
    adapter: &Path,
    config_json: Option<&str>,
) -> Result<(), TrainError> {
    stack::write(&job.plan.spec, &ModelReader::open(exported)?, adapter, origin(job, config_json))
}

/// Merges the exported adapters of a run into their base.
///
/// # Errors
/// [`TrainError::Checkpoint`].
pub(crate) fn export_merged<A: Architecture>(
    job: &Job<A>,
    adapter: &Path,
    model: &Path,
) -> Result<(), TrainError> {
    let base = job.init.pretrained().expect("adapters are merged with a base that was read");
    let (adapter, dtype) = (ModelReader::open(adapter)?, tensor_type(job.export_dtype()));
    Merge { description: job.architecture.description(), base, adapter: &adapter, dtype }.write(model)
}

/// Writes this rank's rows of everything that is exported: averages, if requested and available, else parameters.
/// Returns `None` on ranks of later replicas, which write nothing.
///
/// # Errors
/// [`TrainError::Checkpoint`], or those of the memory.
pub(crate) fn export_model<M: Memory, P: Program<M>>(
    engine: &Engine<M, P>,
    plan: &ExportPlan,
    config: &Resolved,
) -> Result<Option<Receipt>, TrainError> {
    if engine.plan().mesh.coordinate(engine.rank(), Axis::Replicate) > 0 {
        return Ok(None);
    }
    let mut writer = plan.writer();
    let mut values = Vec::new();
    for unit in engine.plan().layout.unit_ids() {
        let shards = engine.shards(unit);
        for (segment, (params, pieces)) in shards.params.iter().zip(shards.pieces).enumerate() {
            // The model of a schedule-free run is the average of its iterates.
            let is_average = config.run.export_weights == ExportWeights::Ema
                || matches!(config.train.optimizer, OptimizerConfig::ScheduleFree(_));
            let averages = if is_average { average(&shards, segment) } else { None };
            let buffer = averages.unwrap_or(params);
            for piece in pieces {
                let names = exported_names(config.adapter.as_ref(), engine.plan().spec.param(piece.param));
                if names.is_empty() {
                    continue;
                }
                values.clear();
                values.resize(piece.len, 0.0);
                let slice = Slice::new(buffer, piece.offset, piece.len);
                engine.memory().read(Queue::Compute, slice, HostSliceMut::F64(&mut values))?;
                for name in names {
                    let (tensor, first) = place_of(name, engine.plan().spec.param(piece.param));
                    writer.write_f64(&tensor, first + piece.param_offset as u64, &values)?;
                }
            }
        }
    }
    Ok(Some(writer.finish()?))
}

/// The averages of a segment's parameters, in their order; `None` for frozen ones.
fn average<'a, B>(shards: &UnitShards<'a, B>, segment: usize) -> Option<&'a B> {
    let tensors = shards.state_tensors.get(segment)?;
    let index = tensors.iter().position(|tensor| tensor.name == Ema::STATE)?;
    Some(shards.state[segment][index])
}
