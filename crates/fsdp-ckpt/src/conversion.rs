//! Converts a checkpoint of any readable format into any writable one.
//!
//! The selection and its names are decided first, as a pure function of names; then every tensor is proved to be
//! complete; then the output is planned; only then is the first byte written. Content that the target cannot represent
//! is left out and listed in the [`ConversionReport`].
//!
//! By default, safetensors files contain the model only, which is their purpose; the other formats contain everything.
//! A change of dtype applies to the model's F64, F32, BF16 and F16 tensors; the optimizer keeps its dtypes, because its
//! counters would lose precision.

mod config;
mod experts;
mod layout;
mod names;
mod select;

use std::{
    num::NonZero,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

pub use config::{expert_names, expert_names_beside};
pub use layout::Layout;
pub use names::Rename;

use crate::{
    checkpoint::{Checkpoint, Experts},
    error::Error,
    file_io::{Files, directory_of},
    files::url::is_url,
    safetensors::{Metadata, TensorType},
    targets::{Selection, dcp, native, safetensors, torch_file},
    transfer::{self, Moved, Options, OutputKind, OutputPlan, Staged},
};

/// Maximum tensor bytes per safetensors file, the same as Hugging Face's.
pub const SHARD_BYTES_MAX: u64 = 5_000_000_000;

/// The note about names that stay as they are.
const MEGATRON_NAMES: &str = "names and shapes are those of Megatron Core; --config with the config.json of the model converts them to Hugging Face's";

/// A writable format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Hugging Face safetensors: one file if the destination ends in `.safetensors`, otherwise a directory.
    Safetensors,
    /// A directory in PyTorch's distributed checkpoint format, for torch 2.4 and later.
    Dcp,
    /// A native checkpoint directory, from which training resumes.
    Native,
    /// A single file in the format of `torch.save`.
    Torch,
}

/// A subset of a checkpoint's tensors and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The model.
    Model,
    /// The optimizer.
    Optimizer,
    /// Everything.
    All,
}

impl Target {
    /// Returns the default selection: the model for safetensors, everything for the other formats.
    pub fn default_part(self) -> Part {
        match self {
            Target::Safetensors => Part::Model,
            Target::Dcp | Target::Native | Target::Torch => Part::All,
        }
    }
}

/// How many times tied weights are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tied {
    /// Under one name, preferably not the one of the output weights.
    Once,
    /// Under both names: if the source has only the embeddings, the output weights become a copy.
    Twice,
}

/// The settings of a conversion.
#[derive(Clone, Debug)]
pub struct Conversion {
    /// The format to write.
    pub target: Target,
    /// Number of ranks of the output, for sharded targets (DCP, native).
    pub world_size: NonZero<usize>,
    /// Maximum tensor bytes per safetensors file of a directory.
    pub shard_bytes_max: u64,
    /// New dtype of the model's F64, F32, BF16 and F16 tensors. `None` keeps their dtypes.
    pub dtype: Option<TensorType>,
    /// The tensors and values to convert.
    pub part: Part,
    /// Where model and optimizer are placed. `None` keeps their places in the source.
    pub layout: Option<Layout>,
    /// How many times tied weights are written. `None` keeps them as in the source, as far as the target can.
    pub tied: Option<Tied>,
    /// The form of the weights of experts. `None` keeps that of the source.
    pub experts: Option<Experts>,
    /// Whether to remove the parts of names that module wrappers have added.
    pub strip_wrappers: bool,
    /// Prefix to remove from names.
    pub strip_prefix: Option<String>,
    /// Renamings, applied in this order after the prefix is removed.
    pub renames: Vec<Rename>,
    /// A Hugging Face configuration to write next to the weights as `config.json`, in a directory of safetensors.
    pub config: Option<PathBuf>,
    /// Metadata of the safetensors files.
    pub metadata: Metadata,
    /// Whether a single-file output replaces an existing file of its name.
    pub replaces: bool,
}

impl Conversion {
    /// Returns the default settings for `target`.
    pub fn new(target: Target) -> Conversion {
        Conversion {
            target,
            world_size: NonZero::<usize>::MIN,
            shard_bytes_max: SHARD_BYTES_MAX,
            dtype: None,
            part: target.default_part(),
            layout: None,
            tied: None,
            experts: None,
            strip_wrappers: false,
            strip_prefix: None,
            renames: Vec::new(),
            config: None,
            metadata: Metadata::new(),
            replaces: false,
        }
    }
}

/// Statistics and notes of a completed conversion.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConversionReport {
    /// Number of tensors written.
    pub tensors: usize,
    /// Number of non-tensor values written.
    pub values: usize,
    /// Total tensor bytes written.
    pub data_bytes: u64,
    /// Number of files written.
    pub files: usize,
    /// Number of source checksums that were verified.
    pub checksums: usize,
    /// Elapsed time.
    pub elapsed: Duration,
    /// Names of selected values that the target cannot represent.
    pub dropped_values: Vec<String>,
    /// Tied tensors that were written once: the omitted name and the one that is kept for it.
    pub tied: Vec<(String, String)>,
    /// Other information for the user.
    pub notes: Vec<String>,
}

/// Converts `checkpoint` to `destination`, which must not exist or be an empty directory, unless it is to be replaced.
///
/// # Errors
/// [`Error::BadRequest`] and [`Error::WrongPath`] if the request or destination makes no sense for this checkpoint,
/// [`Error::NotWhole`] if a tensor is incomplete, the errors of the target's plan, and those of [`transfer::run`].
/// After an error no output is left behind.
pub fn convert(
    checkpoint: &Checkpoint,
    destination: &Path,
    conversion: &Conversion,
    options: &Options,
) -> Result<ConversionReport, Error> {
    let started = Instant::now();
    // A trailing slash has no meaning here, but file systems refuse it for files.
    let destination = &match is_url(destination) {
        true => PathBuf::from(destination.to_string_lossy().trim_end_matches('/')),
        false => destination.components().collect(),
    };
    refuse_inside(checkpoint, destination)?;
    let kind = output_kind(conversion.target, destination);
    let has_config = conversion.target == Target::Safetensors && kind == OutputKind::Directory;
    let is_megatron = checkpoint.has_megatron_names();
    if conversion.config.is_some() && !has_config && conversion.experts.is_none() && !is_megatron {
        let reason = "a configuration needs a directory, but the output is one file; name a directory";
        return Err(Error::wrong_path(destination, reason));
    }
    let staged = match conversion.replaces && kind == OutputKind::File {
        true => Staged::replacing(destination)?,
        false => Staged::new(destination, kind)?,
    };
    let mut report = ConversionReport::default();
    let published = match conversion.config.as_deref().filter(|_| is_megatron) {
        Some(config) => Some(
            checkpoint
                .clone()
                .with_hugging_face_names(&config::model_sizes(config)?, conversion.part != Part::Model)?,
        ),
        None => None,
    };
    if is_megatron && published.is_none() {
        report.notes.push(MEGATRON_NAMES.to_owned());
    }
    let checkpoint = published.as_ref().unwrap_or(checkpoint);
    let viewed = experts::in_form(checkpoint, conversion, options)?;
    let checkpoint = viewed.as_ref().unwrap_or(checkpoint);
    let mut selection = select::select(checkpoint, conversion, &mut report)?;
    for tensor in &selection.tensors {
        checkpoint.tensors[&tensor.source].check_coverage(&checkpoint.sources)?;
    }
    // For the other targets it only names the experts.
    let config = conversion.config.as_deref().filter(|_| conversion.target == Target::Safetensors);
    let config = config.map(config::read).transpose()?;
    if config.as_ref().is_some_and(|config| config.ties_embeddings) {
        config::tie_head(checkpoint, &mut selection, options)?;
    }
    match conversion.tied {
        Some(Tied::Once) => report.tied = selection.drop_tied(),
        Some(Tied::Twice) => config::add_head(checkpoint, &mut selection)?,
        None => {}
    }
    let mut plan = plan(&mut selection, destination, conversion, kind, &mut report)?;
    plan.files.extend(config.filter(|_| has_config).map(config::Config::into_file));
    (report.tensors, report.values) = (selection.tensors.len(), selection.values.len());
    let moved = transfer::run(checkpoint, plan, staged, options)?;
    let Moved { data_bytes, files, checked } = moved;
    (report.data_bytes, report.files, report.checksums) = (data_bytes, files, checked);
    report.elapsed = started.elapsed();
    Ok(report)
}

/// Refuses a destination inside the source directory, where the output would become part of the source.
fn refuse_inside(checkpoint: &Checkpoint, destination: &Path) -> Result<(), Error> {
    let is_index = checkpoint.path.to_string_lossy().ends_with(".index.json");
    let source_dir = if is_index { directory_of(&checkpoint.path) } else { checkpoint.path.clone() };
    if !Files::anywhere().is_directory(&source_dir) {
        return Ok(());
    }
    // If one of them cannot be resolved, reading or writing it will report the error.
    let resolved = |path: &Path| if is_url(path) { Ok(path.to_owned()) } else { path.canonicalize() };
    let (Ok(source), Ok(parent)) = (resolved(&source_dir), resolved(&directory_of(destination))) else {
        return Ok(());
    };
    if parent.starts_with(source) {
        let source = source_dir.display();
        let reason =
            format!("it is inside {source}, which is to be converted; name a destination outside of it");
        return Err(Error::wrong_path(destination, reason));
    }
    Ok(())
}

/// Returns whether the output is one file or a directory.
fn output_kind(target: Target, destination: &Path) -> OutputKind {
    let is_file = match target {
        Target::Safetensors => destination.extension().is_some_and(|extension| extension == "safetensors"),
        Target::Torch => true,
        Target::Dcp | Target::Native => false,
    };
    if is_file { OutputKind::File } else { OutputKind::Directory }
}

fn plan(
    selection: &mut Selection,
    destination: &Path,
    conversion: &Conversion,
    kind: OutputKind,
    report: &mut ConversionReport,
) -> Result<OutputPlan, Error> {
    let world_size = conversion.world_size.get();
    if matches!(conversion.target, Target::Dcp | Target::Torch) {
        selection.expect_torch_types(destination)?;
    }
    match conversion.target {
        Target::Safetensors => {
            let unheld = safetensors::drop_unsupported(selection);
            report.dropped_values.extend(unheld.values);
            report.tied.extend(unheld.tied);
            let max = (kind == OutputKind::Directory).then_some(conversion.shard_bytes_max);
            safetensors::plan(selection, destination, max, conversion.metadata.clone())
        }
        Target::Dcp => dcp::plan(selection, world_size),
        Target::Native => native::plan(selection, world_size),
        Target::Torch => {
            let name = destination.file_name().map(|name| name.to_string_lossy().into_owned());
            torch_file::plan(&name.unwrap_or_default(), selection)
        }
    }
}

#[cfg(test)]
mod tests;
