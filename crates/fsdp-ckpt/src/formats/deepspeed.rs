//! Checkpoint directories of DeepSpeed's ZeRO, stages 1 to 3.
//!
//! Training continues from 32-bit copies of the weights, which lie flattened and cut over the ranks in the
//! `*_optim_states.pt` files; names and shapes, buffers and frozen parameters are in `*_model_states.pt`. The flat
//! copies are what is read: the 16-bit weights beside them are only used for parameters that have no copy. States
//! of the optimizer lie in the same layout, and become `optim.state.<parameter>.<state>`. Buffers keep the type
//! that they were saved in. Parameters that are shared are two names of the same bytes.
//!
//! Not read: checkpoints of tensor or pipeline parallel models, and of experts.
//!
//! This follows the layout as DeepSpeed's own `zero_to_fp32.py` reads it. The tests have small directories of that
//! layout; files of a real DeepSpeed were not at hand.

mod merge;
mod optimizer;
mod parse;
mod place;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use super::{
    rank_fault::{no_rank_files, several_sets},
    rank_file::RankFile,
    rank_names::{complete, sets_of},
};
use crate::{
    checkpoint::Checkpoint,
    error::{Error, Fault},
    file_io::{self, Files},
    formats::fields::count,
    torch::Item,
};

/// The longest `latest` that is read: a file name.
const LATEST_BYTES_MAX: u64 = 4096;

const OPTIMIZER_FILES: &str = "_optim_states.pt";
const MODEL_FILES: &str = "_model_states.pt";

/// Keys of the files of models that have a meaning of their own, or none outside of a run.
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

/// Whether a file of `torch.save` is one of this format.
pub(crate) fn is_rank_file(root: &Item) -> bool {
    let optimizer = root.get("optimizer_state_dict").and_then(|state| state.get("zero_stage"));
    optimizer.is_some() || (root.get("param_shapes").is_some() && root.get("buffer_names").is_some())
}

/// Reads the checkpoint that `latest` in a directory names, that a directory holds, or that a file belongs to.
///
/// # Errors
/// [`Error::Malformed`] when files of ranks are missing or do not belong together; other errors when a file cannot be
/// read.
pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint, Error> {
    let path = path.as_ref();
    let files = Files::anywhere();
    let dir = directory_of(&files, path)?;
    let mut sets = sets_of(&files.list(&dir)?);
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
    let models = RankFile::open_all(&models, &mut checkpoint)?;
    let flats = optimizers.iter().map(parse::flat_states).collect::<Result<Vec<_>, _>>()?;
    let states = models.iter().map(parse::model_states).collect::<Result<Vec<_>, _>>()?;
    checkpoint.format = format!("DeepSpeed ZeRO stage {}, one file per rank", flats[0].stage);
    merge::merge(&flats, &states, &mut checkpoint)?;
    add_others(&models[0], &mut checkpoint)?;
    Ok(checkpoint)
}

/// The directory with the files: the one that `latest` names, the path itself, or that of the file.
pub(crate) fn directory_of(files: &Files, path: &Path) -> Result<PathBuf, Error> {
    if !files.is_directory(path) {
        return Ok(file_io::directory_of(path));
    }
    let names = files.list(path)?;
    let holds_files = names.iter().any(|name| name.ends_with(OPTIMIZER_FILES) || name.ends_with(MODEL_FILES));
    if holds_files || !names.iter().any(|name| name == "latest") {
        return Ok(path.to_owned());
    }
    let latest = path.join("latest");
    let bytes = files.read_small(&latest, LATEST_BYTES_MAX)?.unwrap_or_default();
    let tag = String::from_utf8_lossy(&bytes).trim().to_owned();
    let is_plain = Path::new(&tag).file_name().is_some_and(|name| name == &tag[..]);
    if !is_plain {
        return Err(Fault::unexpected("its text", "the name of a directory beside it").in_file(latest));
    }
    Ok(path.join(tag))
}

/// Adds what else is in the first file of the model, and what of it people want to see.
fn add_others(file: &RankFile, into: &mut Checkpoint) -> Result<(), Error> {
    for (key, name) in [("global_steps", "step"), ("global_samples", "samples")] {
        let number = file.root.get(key).map(Item::to_value).as_ref().and_then(count);
        into.run_state.extend(number.map(|number| (name.to_owned(), number.to_string())));
    }
    file.add_unknown(&KNOWN_KEYS, into)
}
