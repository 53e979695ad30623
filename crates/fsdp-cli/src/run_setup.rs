//! Loads a run file and its model, the first step of every command.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fsdp_ckpt::training::ModelWeights;
use fsdp_ckpt::{is_url, objects};
use fsdp_config::input_file::{self, CONFIG_BYTES_MAX};
use fsdp_config::{Init, Loaded, PaddingRow, Resolved, RunConfig, World};
use fsdp_core::model::{ModelSpec, ParamId, ParamSpec};
use fsdp_nn::hf::{HfConfig, HfModel};
use fsdp_nn::model::{Adapted, Architecture};
use fsdp_train::adapter::peft;
use fsdp_train::metrics::FlopModel;
use fsdp_train::{InitSource, TrainError, adapter};

use crate::args::RunFileArgs;
use crate::cluster;
use crate::device;
use crate::error::CliError;
use crate::output;

/// The model of a run, possibly with adapters.
pub(crate) type Model = Adapted<HfModel>;

/// A run file and the model that it names.
#[derive(Clone, Debug)]
pub(crate) struct RunSetup {
    /// The run file, including all defaults.
    pub(crate) config: Resolved,
    /// The model's `config.json`, without its row for padding if the run file says so.
    pub(crate) model: HfConfig,
}

impl RunSetup {
    /// Reads a run file and its model's `config.json`, and prints warnings on stderr.
    ///
    /// # Errors
    /// [`CliError`]: one of the files is missing or wrong.
    pub(crate) fn load(args: &RunFileArgs) -> Result<Self, CliError> {
        let place = cluster::place()?;
        let (setup, warnings) = Self::read(args, &|run| device::world(place, device::has_gpus(run)))?;
        warnings.iter().for_each(|warning| output::warning(warning));
        Ok(setup)
    }

    /// Reads the files and returns the warnings; `world` supplies what the run file leaves open.
    ///
    /// # Errors
    /// Those of [`RunSetup::load`].
    pub(crate) fn read(
        args: &RunFileArgs,
        world: &dyn Fn(&RunConfig) -> World,
    ) -> Result<(Self, Vec<String>), CliError> {
        Self::of(Resolved::load_for(&args.file, &args.overrides, world)?)
    }

    /// Adds the model to a loaded run file; also returns the warnings.
    ///
    /// # Errors
    /// Those of [`RunSetup::load`].
    pub(crate) fn of(loaded: Loaded) -> Result<(Self, Vec<String>), CliError> {
        let mut warnings: Vec<String> = loaded.warnings.iter().map(ToString::to_string).collect();
        let config = loaded.config;
        let model = read_model(Path::new(&config.model.path))?;
        let model = match config.model.padding_row {
            PaddingRow::Config => model,
            PaddingRow::None => model.without_padding_row(),
        };
        let setup = Self { config, model };
        warnings.extend(setup.position_warning());
        Ok((setup, warnings))
    }

    /// Builds the described model, with the adapters of the run file.
    ///
    /// # Errors
    /// [`CliError::Train`] if the description contradicts itself, or adapters do not fit it.
    pub(crate) fn build(&self) -> Result<Model, CliError> {
        Ok(adapter::adapt(&self.config, self.model.build()?)?)
    }

    /// The source of the initial weights. `taken` is the checkpoint of another trainer that may hold the base of
    /// adapters.
    ///
    /// # Errors
    /// [`CliError::Train`] if pretrained weights, or an adapter to start from, are requested but missing.
    pub(crate) fn init(&self, architecture: &Model, taken: Option<&Path>) -> Result<InitSource, CliError> {
        let base = match self.config.model.init {
            Init::Random => random(self.config.model.seed, architecture),
            Init::Pretrained => {
                let weights = ModelWeights::open(&self.config.model.path).map_err(TrainError::from)?;
                InitSource::Pretrained(Arc::new(weights))
            }
        };
        Ok(base.adapted(&self.config, architecture.description(), taken)?)
    }

    /// The inputs of FLOPs per token: expert parameters count in proportion to the tokens they process.
    pub(crate) fn flops(&self, spec: &ModelSpec, token_shares: &BTreeMap<ParamId, f64>) -> FlopModel {
        let active_elements = |(id, param): (usize, &ParamSpec)| {
            (param.len() as f64 * token_shares.get(&ParamId(id)).unwrap_or(&1.0)) as u64
        };
        let params = || spec.params.iter().enumerate();
        let sizes = self.model.summary();
        FlopModel {
            parameter_count: params().map(active_elements).sum(),
            trained_count: params().filter(|(_, param)| param.trainable).map(active_elements).sum(),
            layer_count: sizes.layers as u64,
            attention_width: (sizes.heads * sizes.head_dim) as u64,
            seq_len: self.config.data.seq_len as u64,
        }
    }

    /// Rotary positions extend beyond the model's context length, but the model was not trained on them.
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

/// Random initial weights of a model.
pub(crate) fn random(seed: u64, architecture: &impl Architecture) -> InitSource {
    InitSource::Random { seed, init: Arc::new(architecture.description().init.clone()) }
}

/// Checks that a directory named by an argument is a model.
///
/// # Errors
/// [`CliError::Option`]: it is an adapter, or has no `config.json`.
pub(crate) fn expect_model(option: &'static str, dir: &Path, others: &str) -> Result<(), CliError> {
    if is_url(dir) || dir.join("config.json").exists() {
        return Ok(());
    }
    let shown = dir.display();
    let what = if dir.join(peft::CONFIG_FILE).exists() {
        format!(
            "{shown} is an adapter, not a whole model; continue from a checkpoint of its run with `fsdp train RUN.toml \
             --resume-from CHECKPOINT --set adapter.merge=true --set run.out_dir=MERGED`, and give MERGED/model"
        )
    } else {
        format!("{shown} has no config.json; give a Hugging Face model directory{others}")
    };
    Err(CliError::Option { option, what })
}

/// Reads the `config.json` of a model directory.
///
/// # Errors
/// [`CliError`]: it is missing or wrong.
pub(crate) fn read_model(dir: &Path) -> Result<HfConfig, CliError> {
    let file = dir.join("config.json");
    let text = match is_url(dir) {
        true => read_object(&file)?,
        false => input_file::read_text(&file, CONFIG_BYTES_MAX).map_err(|source| no_model(file, source))?,
    };
    HfConfig::parse(&text).map_err(|source| CliError::Model { origin: dir.display().to_string(), source })
}

fn no_model(file: PathBuf, source: io::Error) -> CliError {
    let advice = "; model.path must be a Hugging Face directory with config.json";
    CliError::Read { file, advice, source }
}

/// Reads a configuration from an object store.
fn read_object(url: &Path) -> Result<String, CliError> {
    let unreadable = |source| no_model(url.to_owned(), source);
    let text = objects::read(url)?.ok_or_else(|| unreadable(io::ErrorKind::NotFound.into()))?;
    String::from_utf8(text).map_err(|error| unreadable(io::Error::new(io::ErrorKind::InvalidData, error)))
}

#[cfg(test)]
mod tests;
