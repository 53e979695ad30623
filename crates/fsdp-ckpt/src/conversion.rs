//! Converting a checkpoint of any format that is read into any that is written.
//!
//! What is selected and under which names is decided first, as a pure function of names; then the proof that
//! every tensor is whole; then a plan of the output; and only then is a byte written. What the target cannot
//! hold is left out and listed in the [`ConversionReport`].
//!
//! By default safetensors get the model alone, since that is what they are for, and the other formats get
//! everything. A new element type goes to the floating-point tensors of the model; the optimizer keeps its
//! types, because its counters would lose what they count.

mod config;
mod layout;
mod names;
mod select;

use std::{
    num::NonZero,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

pub use layout::Layout;
pub use names::Rename;

use crate::{
    checkpoint::Checkpoint,
    error::Error,
    file_io::{Files, directory_of},
    files::url::is_url,
    safetensors::{Metadata, TensorType},
    targets::{Selection, dcp, native, safetensors, torch_file},
    transfer::{self, Moved, Options, OutputKind, OutputPlan, Staged},
};

/// The most tensor bytes in one safetensors file, as Hugging Face has it.
pub const SHARD_BYTES_MAX: u64 = 5_000_000_000;

/// A format that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Hugging Face safetensors: one file if the destination ends in `.safetensors`, else a directory.
    Safetensors,
    /// A directory of PyTorch's distributed checkpoints, for torch 2.4 and later.
    Dcp,
    /// A directory from which training resumes.
    Native,
    /// One file of `torch.save`.
    Torch,
}

/// Which tensors and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Those of the model.
    Model,
    /// Those of the optimizer.
    Optimizer,
    /// Everything.
    All,
}

impl Target {
    /// What is written when nothing is said: the model for safetensors, everything for others.
    pub fn default_part(self) -> Part {
        match self {
            Target::Safetensors => Part::Model,
            Target::Dcp | Target::Native | Target::Torch => Part::All,
        }
    }
}

/// How often tied weights are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tied {
    /// Under one of their names, not that of the output weights.
    Once,
    /// Under both: the output weights, where the source has only the embeddings, become a copy of them.
    Twice,
}

/// What to convert, and to what.
#[derive(Clone, Debug)]
pub struct Conversion {
    /// The format to write.
    pub target: Target,
    /// Ranks of the output, where the target has such (DCP, native).
    pub world_size: NonZero<usize>,
    /// The most tensor bytes in one safetensors file of a directory.
    pub shard_bytes_max: u64,
    /// Another element type for the floating-point tensors of the model.
    pub dtype: Option<TensorType>,
    /// Which tensors and values.
    pub part: Part,
    /// Where model and optimizer go; without it they stay where the source has them.
    pub layout: Option<Layout>,
    /// How often tied weights are written; without it as often as the source has them and the target can.
    pub tied: Option<Tied>,
    /// Whether what wrappers of modules have put into names is removed.
    pub strip_wrappers: bool,
    /// What to remove from the beginning of names.
    pub strip_prefix: Option<String>,
    /// Renamings, applied in this order after the prefix was removed.
    pub renames: Vec<Rename>,
    /// A Hugging Face configuration to put beside the weights as `config.json`.
    pub config: Option<PathBuf>,
    /// What safetensors files say beside their tensors.
    pub metadata: Metadata,
    /// Whether an output of one file takes the place of what has its name.
    pub replaces: bool,
}

impl Conversion {
    /// Everything as usual.
    pub fn new(target: Target) -> Conversion {
        Conversion {
            target,
            world_size: NonZero::<usize>::MIN,
            shard_bytes_max: SHARD_BYTES_MAX,
            dtype: None,
            part: target.default_part(),
            layout: None,
            tied: None,
            strip_wrappers: false,
            strip_prefix: None,
            renames: Vec::new(),
            config: None,
            metadata: Metadata::new(),
            replaces: false,
        }
    }
}

/// What a conversion did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConversionReport {
    /// Tensors written.
    pub tensors: usize,
    /// Values written that are not tensors.
    pub values: usize,
    /// Bytes of the tensors.
    pub data_bytes: u64,
    /// Files written.
    pub files: usize,
    /// Checksums of the source that were checked on the way.
    pub checksums: usize,
    /// How long it took.
    pub elapsed: Duration,
    /// Names of values that were selected and that the target cannot hold.
    pub dropped_values: Vec<String>,
    /// Tensors that are copies of others, which the target holds once: the copy and what stays for it.
    pub tied: Vec<(String, String)>,
    /// What else a person should know.
    pub notes: Vec<String>,
}

/// Converts `checkpoint` to `destination`, which must not exist (an empty directory may be there), unless it is to be
/// replaced.
///
/// # Errors
/// [`Error::BadRequest`] and [`Error::WrongPath`] for requests and destinations that make no sense for this
/// checkpoint, [`Error::NotWhole`] when a tensor is not whole, the errors of the target's plan, and those of
/// [`transfer::run`]. After an error nothing is left behind.
pub fn convert(
    checkpoint: &Checkpoint,
    destination: &Path,
    conversion: &Conversion,
    options: &Options,
) -> Result<ConversionReport, Error> {
    let started = Instant::now();
    // A slash at the end says nothing about what is made, but file systems refuse it for files.
    let destination = &match is_url(destination) {
        true => PathBuf::from(destination.to_string_lossy().trim_end_matches('/')),
        false => destination.components().collect(),
    };
    refuse_inside(checkpoint, destination)?;
    let kind = output_kind(conversion.target, destination);
    if conversion.config.is_some() && kind == OutputKind::File {
        let reason =
            "a configuration is written into a directory, but this is to be one file; name a directory";
        return Err(Error::wrong_path(destination, reason));
    }
    let staged = match conversion.replaces && kind == OutputKind::File {
        true => Staged::replacing(destination)?,
        false => Staged::new(destination, kind)?,
    };
    let mut report = ConversionReport::default();
    let mut selection = select::select(checkpoint, conversion, &mut report)?;
    for tensor in &selection.tensors {
        checkpoint.tensors[&tensor.source].check_coverage(&checkpoint.sources)?;
    }
    let config = conversion.config.as_deref().map(config::read).transpose()?;
    if config.as_ref().is_some_and(|config| config.ties_embeddings) {
        config::tie_head(checkpoint, &mut selection, options)?;
    }
    match conversion.tied {
        Some(Tied::Once) => report.tied = selection.drop_tied(),
        Some(Tied::Twice) => config::add_head(checkpoint, &mut selection)?,
        None => {}
    }
    let mut plan = plan(&mut selection, destination, conversion, kind, &mut report)?;
    plan.files.extend(config.map(config::Config::into_file));
    (report.tensors, report.values) = (selection.tensors.len(), selection.values.len());
    let moved = transfer::run(checkpoint, plan, staged, options)?;
    let Moved { data_bytes, files, checked } = moved;
    (report.data_bytes, report.files, report.checksums) = (data_bytes, files, checked);
    report.elapsed = started.elapsed();
    Ok(report)
}

/// An output in the directory of its source would become a part of the source.
fn refuse_inside(checkpoint: &Checkpoint, destination: &Path) -> Result<(), Error> {
    let is_index = checkpoint.path.to_string_lossy().ends_with(".index.json");
    let source_dir = if is_index { directory_of(&checkpoint.path) } else { checkpoint.path.clone() };
    if !Files::anywhere().is_directory(&source_dir) {
        return Ok(());
    }
    // Where one of them cannot be resolved, reading or writing it says so.
    let resolved = |path: &Path| if is_url(path) { Ok(path.to_owned()) } else { path.canonicalize() };
    let (Ok(source), Ok(parent)) = (resolved(&source_dir), resolved(&directory_of(destination))) else {
        return Ok(());
    };
    if parent.starts_with(source) {
        let source = source_dir.display();
        let reason = format!(
            "it lies in {source}, which is what is to be converted; name a destination outside of it"
        );
        return Err(Error::wrong_path(destination, reason));
    }
    Ok(())
}

/// Whether the output is one file.
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
    match conversion.target {
        Target::Safetensors => {
            let unheld = safetensors::drop_unheld(selection);
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
