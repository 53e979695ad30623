//! Checkpoint directories of DeepSpeed: ZeRO stages 1 to 3, and stage 0 (no ZeRO).
//!
//! Training continues from 32-bit copies of the weights, which are flattened and partitioned over the ranks in the
//! `*_optim_states.pt` files; names and shapes, buffers and frozen parameters are in `*_model_states.pt`. The weights
//! are read from the flat copies; the 16-bit weights are used only for parameters without a copy. Optimizer states have
//! the same layout and become `optim.state.<parameter>.<state>`. Buffers keep the dtype they were saved in. Shared
//! parameters are two names for the same bytes.
//!
//! In stage 0 nothing is partitioned: the only model file holds whole parameters, and the optimizer state with
//! parameters by number, as in PyTorch.
//!
//! `universal` reads what DeepSpeed made of such checkpoints for any number of ranks.
//!
//! Checkpoints of models with tensor parallelism, pipeline parallelism or layers of `deepspeed.moe` are not read.
//!
//! The layout is the one that DeepSpeed's own `zero_to_fp32.py` reads. Tests use checkpoints of DeepSpeed 0.19.8.

mod merge;
mod optimizer;
mod parse;
mod place;
mod universal;

#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use super::{
    rank_fault::{no_rank_files, same_bytes, several_sets},
    rank_file::RankFile,
    rank_names::{complete, sets_of},
};
use crate::{
    checkpoint::{Checkpoint, Role, Value},
    error::{Error, Fault},
    file_io::{self, Files},
    formats::fields::count,
    torch::Item,
};

/// Files that name the newest checkpoint beside them; the second one, the newest that was made universal.
const LATEST: [&str; 2] = ["latest", "latest_universal"];

/// Maximum length of `latest`, which holds a directory name.
const LATEST_BYTES_MAX: u64 = 4096;

const OPTIMIZER_FILES: &str = "_optim_states.pt";
const MODEL_FILES: &str = "_model_states.pt";

/// The model file of an unpartitioned model.
const UNSHARDED: &str = "mp_rank_00_model_states.pt";

/// Names the unsupported kinds of parallelism and the way out.
const NOT_SUPPORTED: &str = "models split by tensor or pipeline parallelism, and DeepSpeed's own expert \
                             layers, are not supported; gather the model first";

/// Keys of model files that are read elsewhere or mean nothing outside of a run.
const KNOWN_KEYS: [&str; 8] = [
    "module",
    "buffer_names",
    "param_shapes",
    "shared_params",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "optimizer",
    "sparse_tensor_module_names",
];

/// Whether a `torch.save` file is a rank's file of this format.
pub(crate) fn is_rank_file(root: &Item) -> bool {
    let optimizer = root.get("optimizer_state_dict").and_then(|state| state.get("zero_stage"));
    optimizer.is_some() || (root.get("param_shapes").is_some() && root.get("buffer_names").is_some())
}

/// Reads the checkpoint in a directory, the one that `latest` in a directory names, or the one that a file belongs to.
///
/// # Errors
/// [`Error::Malformed`] if rank files are missing or do not belong together; other errors if a file cannot be read.
pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint, Error> {
    let path = path.as_ref();
    let files = Files::anywhere();
    let dir = directory_of(&files, path)?;
    let names = files.list(&dir)?;
    if universal::is_at(&dir, &names) {
        return universal::open(path, &dir, &names);
    }
    refuse_parts(&dir, &names)?;
    let mut sets = sets_of(&names);
    if !sets.keys().any(|pattern| pattern.ends_with(OPTIMIZER_FILES)) && sets.keys().any(|p| is_unsharded(p))
    {
        refuse_part(&dir, names.iter().find(|name| name.ends_with(MODEL_FILES) && *name != UNSHARDED))?;
        return stage_zero(path, &dir.join(UNSHARDED));
    }
    let mut take = |end: &str| {
        let mut patterns = sets.keys().filter(|pattern| pattern.ends_with(end)).cloned();
        let fault = match (patterns.next(), patterns.next()) {
            (Some(pattern), None) => {
                let names = sets.remove(&pattern).expect("the pattern is that of a set");
                return complete(&dir, names);
            }
            (None, _) => no_rank_files("zero_pp_rank_0_mp_rank_00_optim_states.pt"),
            (Some(first), Some(second)) => several_sets(&[first, second]),
        };
        Err(fault.in_file(&dir))
    };
    let (optimizers, models) = (take(OPTIMIZER_FILES)?, take(MODEL_FILES)?);
    let mut checkpoint =
        Checkpoint { path: path.to_owned(), world_size: Some(optimizers.len()), ..Checkpoint::default() };
    let optimizers = RankFile::open_all(&optimizers, &mut checkpoint)?;
    check_copies(&optimizers, &checkpoint)?;
    let models = RankFile::open_all(&models, &mut checkpoint)?;
    let flats = optimizers.iter().map(parse::flat_states).collect::<Result<Vec<_>, _>>()?;
    let states = models.iter().map(parse::model_states).collect::<Result<Vec<_>, _>>()?;
    // Stage 3 partitions frozen parameters over the model files.
    let is_model_cut = flats[0].stage == 3 && states.iter().any(|state| !state.frozen_fragments.is_empty());
    if is_model_cut {
        check_copies(&models, &checkpoint)?;
    }
    checkpoint.format = format!("DeepSpeed ZeRO stage {}, one file per rank", flats[0].stage);
    merge::merge(&flats, &states, &mut checkpoint)?;
    add_others(&models[0], &KNOWN_KEYS, &mut checkpoint)?;
    let cut_models = models.iter().filter(|_| is_model_cut);
    if optimizers.iter().chain(cut_models).any(|file| !file.rank_is_verified) {
        checkpoint.limits.push("swapped rank files: they do not state their rank".to_owned());
    }
    Ok(checkpoint)
}

fn is_unsharded(pattern: &str) -> bool {
    pattern == UNSHARDED.replace("00", "*")
}

/// Refuses pipeline layers, and experts with their optimizers (`expp_rank_0_..`).
fn refuse_parts(dir: &Path, names: &[String]) -> Result<(), Error> {
    let is_part = |name: &&String| {
        name.ends_with("_states.pt") && (name.starts_with("layer_") || name.starts_with("expp_rank_"))
    };
    refuse_part(dir, names.iter().find(is_part))
}

/// Refuses a model if a file holds a part that this module cannot merge.
fn refuse_part(dir: &Path, part: Option<&String>) -> Result<(), Error> {
    let Some(part) = part else { return Ok(()) };
    let reason = format!("{part} holds another part of the model; {NOT_SUPPORTED}");
    Err(Error::unsupported(dir, reason))
}

/// Reads a stage 0 checkpoint, in which nothing is partitioned.
fn stage_zero(path: &Path, file: &Path) -> Result<Checkpoint, Error> {
    let mut checkpoint = Checkpoint {
        path: path.to_owned(),
        format: "DeepSpeed without ZeRO (stage 0)".to_owned(),
        ..Checkpoint::default()
    };
    let file = RankFile::open(file, &mut checkpoint)?;
    let state = |name: &str| match file.root.get(name) {
        Some(Item::Dict(items)) => items.clone(),
        _ => Vec::new(),
    };
    check_uncut(&file)?;
    if state("module").is_empty() {
        return Err(file.unexpected("`module`", "a dict of the parameters"));
    }
    file.add_others(state("module"), Role::Model, &mut checkpoint)?;
    let optimizer = vec![(Value::Str("optimizer".to_owned()), Item::Dict(state("optimizer")))];
    file.add_others(optimizer, Role::Optimizer, &mut checkpoint)?;
    add_others(&file, &KNOWN_KEYS, &mut checkpoint)?;
    Ok(checkpoint)
}

/// Checks that a model file holds the whole model and its optimizer.
fn check_uncut(file: &RankFile) -> Result<(), Error> {
    let value = |item: Option<&Item>| item.map(Item::to_value).filter(|value| *value != Value::None);
    let zero = file.root.get("ds_config").and_then(|config| config.get("zero_optimization"));
    let stage = value(zero.and_then(|zero| zero.get("stage"))).as_ref().and_then(count).unwrap_or(0);
    if stage > 0
        || value(file.root.get("param_shapes")).is_some()
        || value(file.root.get("optimizer")).is_none()
    {
        let reason =
            "its optimizer is in separate files, and none of them (*_optim_states.pt) is here; fetch them";
        return Err(Error::malformed(&file.path, reason));
    }
    match value(file.root.get("mp_world_size")).as_ref().and_then(count) {
        None | Some(1) => Ok(()),
        Some(parts) => {
            let reason = format!("it is one of {parts} parts of the model; {NOT_SUPPORTED}");
            Err(Error::unsupported(&file.path, reason))
        }
    }
}

/// Refuses rank files that are copies of each other, which is when the checksums of all their records are equal.
fn check_copies(files: &[RankFile], checkpoint: &Checkpoint) -> Result<(), Error> {
    let mut seen: BTreeMap<Vec<(u64, u64)>, &RankFile> = BTreeMap::new();
    for file in files {
        let of_file = checkpoint.protections.iter().filter(|protection| protection.source == file.source);
        let digests: Vec<(u64, u64)> =
            of_file.map(|one| (one.range.end - one.range.start, one.digest.value)).collect();
        if digests.is_empty() {
            continue;
        }
        if let Some(first) = seen.insert(digests, file) {
            return Err(same_bytes(&first.path).in_file(&file.path));
        }
    }
    Ok(())
}

/// Whether `latest` is among the names in a directory and names a directory with DeepSpeed's files.
pub(super) fn is_named_in(dir: &Path, names: &[String]) -> bool {
    let files = Files::anywhere();
    let newest = || directory_of(&files, dir).ok().filter(|newest| newest != dir);
    names.iter().any(|name| LATEST.contains(&&name[..]))
        && newest().is_some_and(|newest| files.list(&newest).is_ok_and(|names| holds_files(&names)))
}

fn holds_files(names: &[String]) -> bool {
    names.iter().any(|name| name.ends_with(OPTIMIZER_FILES) || name.ends_with(MODEL_FILES))
}

/// The directory with DeepSpeed's files: the one that `latest` names, the path itself, or the parent of a file.
pub(crate) fn directory_of(files: &Files, path: &Path) -> Result<PathBuf, Error> {
    if !files.is_directory(path) {
        return Ok(file_io::directory_of(path));
    }
    let names = files.list(path)?;
    let Some(latest) = LATEST.into_iter().find(|latest| names.iter().any(|name| name == latest)) else {
        return Ok(path.to_owned());
    };
    if holds_files(&names) {
        return Ok(path.to_owned());
    }
    let latest = path.join(latest);
    let bytes = files.read_small(&latest, LATEST_BYTES_MAX)?.unwrap_or_default();
    let tag = String::from_utf8_lossy(&bytes).trim().to_owned();
    let is_plain = Path::new(&tag).file_name().is_some_and(|name| name == &tag[..]);
    if !is_plain {
        return Err(Fault::unexpected("its text", "the name of a directory beside it").in_file(latest));
    }
    Ok(path.join(tag))
}

/// Adds the other contents of the first model file, and its step and sample counts as facts about the run.
fn add_others(file: &RankFile, known: &[&str], into: &mut Checkpoint) -> Result<(), Error> {
    for (key, name) in [("global_steps", "step"), ("global_samples", "samples")] {
        let number = file.root.get(key).map(Item::to_value).as_ref().and_then(count);
        into.run_state.extend(number.map(|number| (name.to_owned(), number.to_string())));
    }
    file.add_unknown(known, into)
}
