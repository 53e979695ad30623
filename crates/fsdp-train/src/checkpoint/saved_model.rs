//! The parameters of a checkpoint without the run that saved them, for evaluation.

use std::path::Path;

use fsdp_ckpt::checkpoint::Role;
use fsdp_ckpt::native::NativeReader;
use fsdp_ckpt::safetensors::{TensorSpec, TensorType};
use fsdp_config::{AdapterConfig, Resolved};
use fsdp_core::Memory;
use fsdp_core::engine::{Engine, Origin};
use fsdp_core::model::ModelSpec;
use fsdp_core::program::Program;

use super::restore::Rows;
use super::run_state::{RunState, other_run};
use super::source::has_manifest;
use super::table::rows_of;
use crate::error::TrainError;
use crate::init::InitSource;

/// A checkpoint opened to read its model.
#[derive(Debug)]
pub struct SavedModel {
    reader: NativeReader,
    state: RunState,
}

impl SavedModel {
    /// Opens the checkpoint in a directory; `None` if the directory holds none.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`] for a damaged one; [`TrainError::Input`] for one without the state of a run.
    pub fn open(dir: &Path) -> Result<Option<Self>, TrainError> {
        if !has_manifest(dir)? {
            return Ok(None);
        }
        let reader = NativeReader::open(dir)?;
        let state = RunState::read(&reader)?;
        Ok(Some(Self { reader, state }))
    }

    /// The text of the model's `config.json`; `None` if it has none.
    pub fn config_json(&self) -> Option<&str> {
        self.state.model.as_deref()
    }

    /// The checkpoint of another trainer that holds the base of the adapters; `None` if `model.path` does.
    pub fn base_from(&self) -> Option<&Path> {
        self.state.base_from.as_deref()
    }

    /// The adapters that the run trained, if any. Their values are in the checkpoint; those of the base are not.
    ///
    /// # Errors
    /// [`TrainError::Config`] for a configuration that this version does not understand.
    pub fn adapter(&self) -> Result<Option<AdapterConfig>, TrainError> {
        let origin = self.reader.dir().display().to_string();
        let adapter = Resolved::parse(&self.state.config, &origin, &[])?.config.adapter;
        Ok(adapter.map(|adapter| AdapterConfig { path: None, merge: false, ..adapter }))
    }

    /// Checks that the checkpoint, together with the base if there is one, holds exactly the described model.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`], with a list of all tensors that are missing, unexpected or of another shape;
    /// [`TrainError::Input`] for another base.
    pub(crate) fn check(&self, spec: &ModelSpec, init: &InitSource) -> Result<(), TrainError> {
        let saved = &self.reader.manifest().tensors;
        let has_base = matches!(init, InitSource::Adapted(_));
        let params = spec.params.iter().filter(|param| param.trainable || !has_base).map(|param| {
            let dtype = saved.get(&param.fqn).map_or(TensorType::F32, |tensor| tensor.dtype);
            TensorSpec { name: param.fqn.clone(), dtype, shape: param.shape.clone() }
        });
        let others = saved.iter().filter(|(_, tensor)| tensor.role != Role::Model).map(|(name, tensor)| {
            TensorSpec { name: name.clone(), dtype: tensor.dtype, shape: tensor.shape.clone() }
        });
        let expected: Vec<TensorSpec> = params.chain(others).collect();
        self.reader.check_tensors(&expected)?;
        let difference = self.state.base_difference(init.base_digest()).filter(|_| has_base);
        difference.map_or(Ok(()), |difference| Err(other_run(self.reader.dir(), &[difference])))
    }

    /// Fills an engine with the described parameters; values of a base come from the job's `init`.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`].
    pub(crate) fn load<M: Memory, P: Program<M>>(
        &self,
        engine: &mut Engine<M, P>,
        spec: &ModelSpec,
        init: &InitSource,
    ) -> Result<(), TrainError> {
        let mut rows = Rows::of(&self.reader);
        engine.load_params(Origin::Read, |piece, values| -> Result<(), TrainError> {
            let param = spec.param(piece.param);
            if !self.reader.manifest().tensors.contains_key(&param.fqn) {
                return init.fill(spec, piece, values);
            }
            rows.read(&param.fqn, rows_of(param, piece.param_offset, piece.len), values)
        })
    }
}
