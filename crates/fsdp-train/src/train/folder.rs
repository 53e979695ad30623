//! The output folder of a run: what is in it, and what was in it before the run.

use std::fs;
use std::path::{Path, PathBuf};

use fsdp_ckpt::native::RunDir;
use fsdp_ckpt::{is_url, objects};
use fsdp_comm::process::rendezvous::{LEADER_FILE, TOKEN_FILE};
use fsdp_config::DataConfig;
use fsdp_config::input_file;
use fsdp_data::resolve_links;
use toml::Table;

use crate::adapter::peft::ADAPTER_FILE;
use crate::error::TrainError;
use crate::metrics::{EVALUATIONS, METRICS, MLFLOW, STEPS, TENSORBOARD, last_step, last_step_in};

/// Folder of the exported model, inside the output folder.
pub(super) const MODEL: &str = "model";

/// File with the exported weights.
pub(super) const MODEL_FILE: &str = "model.safetensors";

/// Folder of the exported adapters, inside the output folder.
pub(super) const ADAPTER: &str = "adapter";

/// File in the output folder with the divergences of a run.
pub(super) const ATTEMPTS_FILE: &str = "divergences.json";

/// File in the output folder that holds the run file with every default written out.
pub(super) const RESOLVED: &str = "resolved.toml";

/// Whether the output folder contains anything besides its lock, the files with which processes find each other, flight
/// records of failed processes, cached tokens, and the empty folders left by a run that failed before its first step.
///
/// # Errors
/// [`TrainError`] if the path is a file or cannot be read.
pub fn is_filled(out_dir: &Path, data: &DataConfig) -> Result<bool, TrainError> {
    if is_url(out_dir) {
        return Ok(!objects::names(out_dir)?.is_empty());
    }
    let cache = resolve_links(&data.cache_folder(out_dir));
    let entries = match fs::read_dir(out_dir) {
        Ok(entries) => entries,
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(source) if source.kind() == std::io::ErrorKind::NotADirectory => {
            return Err(TrainError::Input(format!(
                "run.out_dir {} is a file; remove it, or choose another run.out_dir",
                out_dir.display()
            )));
        }
        Err(source) => return Err(TrainError::io("open", out_dir)(source)),
    };
    for entry in entries {
        let entry = entry.map_err(TrainError::io("open", out_dir))?;
        let is_empty = || fs::read_dir(entry.path()).is_ok_and(|mut entries| entries.next().is_none());
        let name = entry.file_name();
        let is_run_folder = [RunDir::CHECKPOINTS, MODEL, ADAPTER].into_iter().any(|folder| name == folder);
        let is_coordination_file =
            [RunDir::LOCK_FILE, LEADER_FILE, TOKEN_FILE].into_iter().any(|file| name == file);
        let is_flight_record =
            name.to_str().is_some_and(|name| name.starts_with("flight-") && name.ends_with(".jsonl"));
        let has_cache = || cache.starts_with(resolve_links(&entry.path()));
        if !(is_coordination_file || is_flight_record || has_cache() || is_run_folder && is_empty()) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The error of a new run for an output folder that [`is_filled`].
pub fn not_empty(out_dir: &Path) -> TrainError {
    TrainError::Input(format!(
        "run.out_dir {} is not empty; pass --resume to continue, --overwrite to replace it, or choose another run.out_dir",
        out_dir.display()
    ))
}

/// Returns the exported model in the folder, unless it is older than an unfinished run there: with `overwrite`, the
/// model of the previous run stays until the export replaces it.
pub(super) fn finished_model(out_dir: &Path) -> Result<Option<PathBuf>, TrainError> {
    let model = out_dir.join(MODEL).join(MODEL_FILE);
    if is_url(out_dir) {
        return Ok(is_finished_in_store(out_dir, &model)?.then_some(model));
    }
    let adapter = out_dir.join(ADAPTER).join(ADAPTER_FILE);
    let Some(model) = [model, adapter].into_iter().find(|path| fs::symlink_metadata(path).is_ok()) else {
        return Ok(None);
    };
    let metrics = out_dir.join(METRICS);
    let done = last_step(&metrics).map_err(TrainError::io("read", &metrics))?;
    let planned = input_file::read_text(&out_dir.join(RESOLVED), input_file::CONFIG_BYTES_MAX).ok();
    let is_interrupted =
        done.zip(planned.as_deref().and_then(planned_steps)).is_some_and(|(done, planned)| done < planned);
    let is_older = is_older(&model, &out_dir.join(RESOLVED));
    Ok((!(is_interrupted && is_older)).then_some(model))
}

/// Whether one file was written before the other. A run writes its run file when it begins and its model when it ends.
fn is_older(file: &Path, other: &Path) -> bool {
    let modified = |path: &Path| fs::metadata(path).and_then(|found| found.modified()).ok();
    modified(file).zip(modified(other)).is_some_and(|(file, other)| file < other)
}

/// Like [`finished_model`], in an object store: there, modification times are not compared.
fn is_finished_in_store(out_dir: &Path, model: &Path) -> Result<bool, TrainError> {
    let folder = model.parent().unwrap_or(out_dir);
    if !objects::names(folder)?.iter().any(|name| name == MODEL_FILE) {
        return Ok(false);
    }
    let done = objects::read(&out_dir.join(METRICS))?.map(|lines| last_step_in(&lines));
    let resolved = objects::read(&out_dir.join(RESOLVED))?.and_then(|text| String::from_utf8(text).ok());
    let planned = resolved.as_deref().and_then(planned_steps);
    Ok(done.zip(planned).is_none_or(|(done, planned)| done >= planned))
}

/// `train.steps` of a run file; `None` if it cannot be read.
fn planned_steps(resolved: &str) -> Option<u64> {
    let resolved: Table = resolved.parse().ok()?;
    u64::try_from(resolved.get("train")?.get("steps")?.as_integer()?).ok()
}

/// Whether a run with this output folder writes or replaces the given path.
pub fn is_output(out_dir: &Path, path: &Path) -> bool {
    let (out_dir, path) = (resolve_links(out_dir), resolve_links(path));
    let is_file = |name| path == out_dir.join(name);
    [METRICS, STEPS, EVALUATIONS, RESOLVED, ATTEMPTS_FILE, RunDir::LOCK_FILE].into_iter().any(is_file)
        || [MODEL, ADAPTER, RunDir::CHECKPOINTS, DataConfig::CACHE, TENSORBOARD, MLFLOW]
            .iter()
            .any(|folder| path.starts_with(out_dir.join(folder)))
}
