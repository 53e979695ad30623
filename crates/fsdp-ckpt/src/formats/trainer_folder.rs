//! The files that trainers save beside a model: the optimizer, the scheduler and the RNG states, each in its own file.
//!
//! The Trainer of Hugging Face (`checkpoint-500/`) and `save_state` of Accelerate save such folders. The model is in
//! the same folder or, if FSDP saved it in parts, in a subfolder (`pytorch_model_fsdp_0/`, with `optimizer_0/` beside
//! it). The contents of a file beside the model get the file name as a prefix; optimizer tensors have numbers, as
//! PyTorch numbers parameters.

use std::path::{Path, PathBuf};

use crate::{
    checkpoint::{Checkpoint, Key, Role},
    error::{Error, Fault, listed},
    file_io::Files,
};

/// The file in which the Trainer records the state of its run.
pub(super) const TRAINER_STATE: &str = "trainer_state.json";

/// Maximum length of [`TRAINER_STATE`] that is read; the file holds all losses.
const TRAINER_STATE_BYTES_MAX: u64 = 1 << 26;

/// Prefix of the folders of models that FSDP saved in parts; a number follows.
const MODEL_FOLDER: &str = "pytorch_model_fsdp_";

/// Prefix of optimizer folders, and of optimizer files after the first; a number follows.
const OPTIMIZER_FOLDER: &str = "optimizer_";

/// Names of model files, without endings.
const MODELS: [&str; 2] = ["pytorch_model", "pytorch_model_fsdp"];

/// Name of optimizer files, without endings.
const OPTIMIZER: &str = "optimizer";

/// Endings of optimizer files. If there are several files, all but the first have a number (`optimizer_1.bin`).
const OPTIMIZER_ENDINGS: [&str; 2] = [".pt", ".bin"];

/// Prefixes and endings of the names of other files.
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

/// The loss that a folder without a list of its files cannot reveal.
const UNLISTED: &str =
    "files that are gone from the folder: trainers keep no list of the files beside a model";

/// Maximum number of names in the description of a checkpoint.
const LISTED_MAX: usize = 4;

/// Whether a trainer saves a file of this name beside a model.
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

/// Whether a name is this prefix and a number.
fn is_numbered(name: &str, start: &str) -> bool {
    name.strip_prefix(start).is_some_and(|number| number.parse::<u32>().is_ok())
}

/// The subfolder of the model, if there is one; the first one if there are several.
pub(super) fn model_folder(dir: &Path, names: &[String]) -> Option<PathBuf> {
    names.iter().find(|name| is_numbered(name, MODEL_FOLDER)).map(|name| dir.join(name))
}

/// Checks that a trainer's file was saved under its name, which is the folder in its archive.
///
/// # Errors
/// If it was saved under another name that trainers use. Model names are interchangeable.
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
        "it was saved as `{folder}` but has the name of `{stem}`: one file was copied over another; fetch \
         them again"
    );
    Err(Fault::new(reason))
}

/// Adds the contents of the files beside a model, which `open` reads.
///
/// # Errors
/// [`Error::Malformed`] if the checkpoint that was opened as the model holds no model.
pub(super) fn add(
    model: &mut Checkpoint,
    dir: &Path,
    names: &[String],
    open: fn(&Path) -> Result<Checkpoint, Error>,
) -> Result<(), Error> {
    let beside: Vec<String> = names.iter().filter(|name| is_beside_model(name)).cloned().collect();
    if !beside.is_empty() && model.tensors.values().all(|tensor| tensor.role != Role::Model) {
        return Err(no_model(dir, &beside));
    }
    let mut added = Vec::new();
    let mut has_optimizer = false;
    for name in names {
        let Some(role) = role_of(name) else { continue };
        let stem = name.rsplit_once('.').map_or(&name[..], |(stem, _)| stem);
        // An optimizer in a folder was saved under its own key. So was the next one, which therefore needs a prefix.
        let is_under_key = is_numbered(name, OPTIMIZER_FOLDER) && !has_optimizer;
        has_optimizer |= is_under_key;
        let prefix = if is_under_key { Vec::new() } else { vec![Key::Name(stem.to_owned())] };
        let mut part = open(&dir.join(name))?;
        // Run facts come from the trainer's own state; values may be named after the file.
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

/// The error for a trainer's folder without a model.
pub(super) fn no_model(dir: &Path, beside: &[String]) -> Error {
    let reason = format!(
        "it holds what trainers leave beside a model ({}), but no model: fetch the folder again, or name one \
         of these to read it alone",
        listed(beside, LISTED_MAX)
    );
    Error::malformed(dir, reason)
}

/// The progress of the run. An unreadable file is not a reason to refuse the checkpoint.
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
