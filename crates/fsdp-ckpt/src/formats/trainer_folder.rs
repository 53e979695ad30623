//! What trainers leave beside a model: the optimizer, the scheduler and the random states, each in a file of its own.
//!
//! The Trainer of Hugging Face (`checkpoint-500/`) and `save_state` of Accelerate do so. The model lies in the same folder
//! or, where FSDP saved it in parts, in one of its own (`pytorch_model_fsdp_0/`, with `optimizer_0/` beside it). What is
//! beside the model gets the name of its file in front of its names; tensors of the optimizer are numbered, as PyTorch
//! numbers parameters.

use std::path::{Path, PathBuf};

use super::detect;
use crate::{
    checkpoint::{Checkpoint, Key, Role},
    error::{Error, Fault, listed},
    file_io::Files,
};

/// What the Trainer says of its run.
pub(super) const TRAINER_STATE: &str = "trainer_state.json";

/// The longest one that is read: it holds all losses.
const TRAINER_STATE_BYTES_MAX: u64 = 1 << 26;

/// How folders of FSDP's parts of a model begin; its number follows.
const MODEL_FOLDER: &str = "pytorch_model_fsdp_";

/// The same of optimizers, and how names of files begin of those behind the first.
const OPTIMIZER_FOLDER: &str = "optimizer_";

/// What files of models are named, without endings.
const MODELS: [&str; 2] = ["pytorch_model", "pytorch_model_fsdp"];

/// The same of optimizers.
const OPTIMIZER: &str = "optimizer";

/// Endings of files of optimizers. Of several, all but the first have a number (`optimizer_1.bin`).
const OPTIMIZER_ENDINGS: [&str; 2] = [".pt", ".bin"];

/// Beginnings and endings of names of other files.
const OTHERS: [(&str, &str); 10] = [
    ("scheduler", ".pt"),
    ("scheduler", ".bin"),
    ("scaler", ".pt"),
    ("rng_state", ".pth"),
    ("random_states_", ".pkl"),
    ("sampler", ".bin"),
    ("dl_state_dict", ".bin"),
    ("custom_checkpoint_", ".pkl"),
    ("scaler", ".bin"),
    ("training_args", ".bin"),
];

/// What a folder can not show.
const UNLISTED: &str =
    "files that are gone from the folder: trainers keep no list of what lies beside a model";

/// Names that the description of a checkpoint lists.
const LISTED_MAX: usize = 4;

/// Whether a file of this name goes with a model.
pub(super) fn is_beside_model(name: &str) -> bool {
    role_of(name).is_some()
}

fn role_of(name: &str) -> Option<Role> {
    let is_other = |(start, end): &(&str, &str)| name.starts_with(start) && name.ends_with(end);
    let stem = OPTIMIZER_ENDINGS.iter().find_map(|ending| name.strip_suffix(ending)).unwrap_or_default();
    if is_numbered(name, OPTIMIZER_FOLDER) || stem == OPTIMIZER || is_numbered(stem, OPTIMIZER_FOLDER) {
        Some(Role::Optimizer)
    } else {
        OTHERS.iter().any(is_other).then_some(Role::Other)
    }
}

/// Whether a name is this beginning and a number.
fn is_numbered(name: &str, start: &str) -> bool {
    name.strip_prefix(start).is_some_and(|number| number.parse::<u32>().is_ok())
}

/// The folder of the model, where it has one; of several, the first.
pub(super) fn model_folder(dir: &Path, names: &[String]) -> Option<PathBuf> {
    names.iter().find(|name| is_numbered(name, MODEL_FOLDER)).map(|name| dir.join(name))
}

/// Checks that a file of a trainer was saved under its name, which is the folder in its archive.
///
/// # Errors
/// When it was saved under another name that trainers use. Names of models may be exchanged.
pub(super) fn check_saved_name(path: &Path, folder: &str) -> Result<(), Fault> {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let is_model = |stem: &str| MODELS.contains(&stem);
    let is_known = |stem: &str| {
        is_model(stem)
            || stem.starts_with(OPTIMIZER)
            || OTHERS.iter().any(|(start, _)| stem.starts_with(start))
    };
    let are_known = is_known(&stem) && is_known(folder) && !(is_model(&stem) && is_model(folder));
    if stem == folder || !are_known {
        return Ok(());
    }
    let reason = format!(
        "it was saved as `{folder}` and has the name of `{stem}`: one file was copied over another; fetch them again"
    );
    Err(Fault::new(reason))
}

/// Adds what lies beside a model in a folder.
///
/// # Errors
/// [`Error::Malformed`] when what was taken for the model holds none.
pub(super) fn add(model: &mut Checkpoint, dir: &Path, names: &[String]) -> Result<(), Error> {
    let beside: Vec<String> = names.iter().filter(|name| is_beside_model(name)).cloned().collect();
    if !beside.is_empty() && model.tensors.values().all(|tensor| tensor.role != Role::Model) {
        return Err(no_model(dir, &beside));
    }
    let mut added = Vec::new();
    let mut has_optimizer = false;
    for name in names {
        let Some(role) = role_of(name) else { continue };
        let stem = name.rsplit_once('.').map_or(&name[..], |(stem, _)| stem);
        // In a folder of its own, the optimizer was saved under its key, as was the next one.
        let is_under_key = is_numbered(name, OPTIMIZER_FOLDER) && !has_optimizer;
        has_optimizer |= is_under_key;
        let prefix = if is_under_key { Vec::new() } else { vec![Key::Name(stem.to_owned())] };
        let mut part = detect::open(dir.join(name))?;
        // Facts of a run are the trainer's to tell, and names of values may be those of the file.
        part.run_state.clear();
        model.join(part, &prefix, Some(role))?;
        added.push(name.clone());
    }
    if !added.is_empty() {
        model.limits.push(UNLISTED.to_owned());
        model.format = format!("{}; beside it {}", model.format, listed(&added, LISTED_MAX));
    }
    model.run_state.extend(trainer_state(dir, names));
    dir.clone_into(&mut model.path);
    Ok(())
}

/// A folder of a trainer whose model is not there.
pub(super) fn no_model(dir: &Path, beside: &[String]) -> Error {
    let reason = format!(
        "it holds what trainers leave beside a model ({}), and no model: fetch the folder again, or name one of these to \
         read it alone",
        listed(beside, LISTED_MAX)
    );
    Error::malformed(dir, reason)
}

/// How far the run was. A file that says nothing of it is no reason to refuse the rest.
fn trainer_state(dir: &Path, names: &[String]) -> Vec<(String, String)> {
    if !names.iter().any(|name| name == TRAINER_STATE) {
        return Vec::new();
    }
    let text = Files::anywhere().read_small(&dir.join(TRAINER_STATE), TRAINER_STATE_BYTES_MAX);
    let state: serde_json::Value =
        text.ok().flatten().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default();
    let facts = [("step", "global_step"), ("epoch", "epoch")];
    let fact = |(name, key): (&str, &str)| Some((name.to_owned(), state.get(key)?.as_number()?.to_string()));
    facts.into_iter().filter_map(fact).collect()
}
