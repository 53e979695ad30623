//! From a run file to its model: what every command does first.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use fsdp_ckpt::training::ModelWeights;
use fsdp_ckpt::{is_url, objects};
use fsdp_core::model::{ModelSpec, ParamId, ParamSpec};
use fsdp_nn::hf::{HfConfig, HfModel};
use fsdp_nn::model::{Adapted, Architecture};
use fsdp_train::adapter::peft;
use fsdp_train::config::{Init, Loaded, Resolved, RunConfig};
use fsdp_train::input_file::{self, CONFIG_BYTES_MAX};
use fsdp_train::metrics::FlopModel;
use fsdp_train::{InitSource, TrainError, adapter};

use crate::args::RunFileArgs;
use crate::cluster;
use crate::device;
use crate::error::CliError;
use crate::output;

/// What a run trains: a model, perhaps with adapters.
pub(crate) type Model = Adapted<HfModel>;

/// A run file and the model that it names.
#[derive(Clone, Debug)]
pub(crate) struct RunSetup {
    /// The run file, every default written out.
    pub(crate) config: Resolved,
    /// The model's `config.json`.
    pub(crate) model: HfConfig,
}

impl RunSetup {
    /// Reads a run file and its model's `config.json`, and says on stderr what the user should hear.
    ///
    /// # Errors
    /// [`CliError`]: one of the files is missing or wrong.
    pub(crate) fn load(args: &RunFileArgs) -> Result<Self, CliError> {
        let place = cluster::place()?;
        let (setup, warnings) = Self::read(args, &|run| device::ranks(place, device::has_gpus(run)))?;
        warnings.iter().for_each(|warning| output::warning(warning));
        Ok(setup)
    }

    /// Reads them for a run that has so many ranks if it does not say, and returns what the user should hear.
    ///
    /// # Errors
    /// As [`RunSetup::load`].
    pub(crate) fn read(
        args: &RunFileArgs,
        ranks: &dyn Fn(&RunConfig) -> usize,
    ) -> Result<(Self, Vec<String>), CliError> {
        Self::of(Resolved::load_for(&args.file, &args.overrides, ranks)?)
    }

    /// A run file that was read, with the model that it names, and what the user should hear.
    ///
    /// # Errors
    /// As [`RunSetup::load`].
    pub(crate) fn of(loaded: Loaded) -> Result<(Self, Vec<String>), CliError> {
        let mut warnings: Vec<String> = loaded.warnings.iter().map(ToString::to_string).collect();
        let config = loaded.config;
        let model = read_model(Path::new(&config.model.path))?;
        let setup = Self { config, model };
        warnings.extend(setup.position_warning());
        Ok((setup, warnings))
    }

    /// The described model, with the adapters of the run file.
    ///
    /// # Errors
    /// [`CliError::Train`] when the description contradicts itself, or adapters do not fit it.
    pub(crate) fn build(&self) -> Result<Model, CliError> {
        Ok(adapter::adapt(&self.config, self.model.build()?)?)
    }

    /// Where the first weights come from.
    ///
    /// # Errors
    /// [`CliError::Train`] when pretrained weights are asked for, or an adapter to begin with, and not there.
    pub(crate) fn init(&self, architecture: &Model) -> Result<InitSource, CliError> {
        let base = match self.config.model.init {
            Init::Random => random(self.config.model.seed, architecture),
            Init::Pretrained => {
                let weights = ModelWeights::open(&self.config.model.path).map_err(TrainError::from)?;
                InitSource::Pretrained(Arc::new(weights))
            }
        };
        Ok(base.adapted(&self.config, architecture.description())?)
    }

    /// What the FLOPs of a token depend on: parameters of experts count with the part of the tokens that they meet.
    pub(crate) fn flops(&self, spec: &ModelSpec, token_shares: &BTreeMap<ParamId, f64>) -> FlopModel {
        let met = |(id, param): (usize, &ParamSpec)| {
            (param.len() as f64 * token_shares.get(&ParamId(id)).unwrap_or(&1.0)) as u64
        };
        let params = || spec.params.iter().enumerate();
        let sizes = self.model.summary();
        FlopModel {
            parameter_count: params().map(met).sum(),
            trained_count: params().filter(|(_, param)| param.trainable).map(met).sum(),
            layer_count: sizes.layers as u64,
            attention_width: (sizes.heads * sizes.head_dim) as u64,
            seq_len: self.config.data.seq_len as u64,
        }
    }

    /// Rotary positions go on beyond what a model was made for, but it never saw them.
    fn position_warning(&self) -> Option<String> {
        let sizes = self.model.summary();
        let (seq_len, positions) = (self.config.data.seq_len, sizes.positions);
        (seq_len > positions && !sizes.positions_are_learned).then(|| {
            format!(
                "data.seq_len = {seq_len} is beyond the {positions} positions that the model was made for \
                 (max_position_embeddings)"
            )
        })
    }
}

/// Random weights of a model.
pub(crate) fn random(seed: u64, architecture: &impl Architecture) -> InitSource {
    InitSource::Random { seed, init: Arc::new(architecture.description().init.clone()) }
}

/// That a directory which an argument names is that of a model.
///
/// # Errors
/// [`CliError::Option`]: it is an adapter, or nothing with a `config.json`.
pub(crate) fn expect_model(option: &'static str, dir: &Path, others: &str) -> Result<(), CliError> {
    if is_url(dir) || dir.join("config.json").exists() {
        return Ok(());
    }
    let shown = dir.display();
    let what = if dir.join(peft::CONFIG_FILE).exists() {
        format!(
            "{shown} is an adapter, and not a whole model; go on from a checkpoint of its run with `fsdp train RUN.toml \
             --resume-from CHECKPOINT --set adapter.merge=true --set run.out_dir=MERGED`, and give MERGED/model"
        )
    } else {
        format!("{shown} has no config.json; give a Hugging Face model directory{others}")
    };
    Err(CliError::Option { option, what })
}

/// The `config.json` of a model directory.
///
/// # Errors
/// [`CliError`]: it is missing or wrong.
pub(crate) fn read_model(dir: &Path) -> Result<HfConfig, CliError> {
    let file = dir.join("config.json");
    let text = match is_url(dir) {
        true => read_object(&file)?,
        false => input_file::read_text(&file, CONFIG_BYTES_MAX)
            .map_err(|source| CliError::ReadModel { file, source })?,
    };
    HfConfig::parse(&text).map_err(|source| CliError::Model { origin: dir.display().to_string(), source })
}

/// The text of a configuration in an object store.
fn read_object(url: &Path) -> Result<String, CliError> {
    let unreadable = |source| CliError::ReadModel { file: url.to_owned(), source };
    let text = objects::read(url)?.ok_or_else(|| unreadable(io::ErrorKind::NotFound.into()))?;
    String::from_utf8(text).map_err(|error| unreadable(io::Error::new(io::ErrorKind::InvalidData, error)))
}

#[cfg(test)]
mod tests;
