//! `fsdp audit --init`: writes a run file from what the folder of a run says of itself.
//!
//! Each key says where its value comes from. What the folder does not say is a commented line that tells what to fill in.
//! The optimizer's settings are found by the names of the model's parameters, as the audit itself finds moments, so a run file
//! with them describes groups that the audit can match.

mod folder;
mod groups;
mod lines;
mod program;
mod titan;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use fsdp_config::Resolved;
use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_data::RunData;
use fsdp_train::Job;
use fsdp_train::audit::{SavedOptimizer, expect_whole_moments};
use fsdp_train::lr::LrSchedule;

use crate::atomic_file;
use crate::error::CliError;
use crate::exit_code::Exit;
use crate::output;
use crate::run_setup::{Model, RunSetup};
use crate::toml_text::strings;
use folder::Folder;
use groups::Groups;
use lines::{Lines, RunFile};
use program::Program;

/// Writes the run file, or prints it without a `file`.
///
/// # Errors
/// [`CliError`]: the folder has no checkpoint, one that cannot be audited, or the file exists.
pub(super) fn run(dir: &Path, file: Option<&Path>) -> Result<Exit, CliError> {
    expect_whole_moments(dir)?;
    let folder = Folder::read(dir)?;
    let text = of(&folder);
    let Some(file) = file else {
        output::print(&text)?;
        return Ok(Exit::Done);
    };
    atomic_file::create(file, &text).map_err(CliError::write(file))?;
    let open = text.lines().filter(|line| line.starts_with(lines::OPEN)).count();
    let rest = match open {
        0 => String::new(),
        open => {
            format!("; fill in what the folder does not say: {open} lines that begin with `{}`", lines::OPEN)
        }
    };
    output::print(&format!("wrote {}{rest}\n", file.display()))?;
    Ok(Exit::Done)
}

/// Says which lines of a run file are still to be filled in, because findings may come from them.
pub(super) fn say_open(file: &Path) {
    let text = fs::read_to_string(file).unwrap_or_default();
    let open = text.lines().filter_map(|line| line.strip_prefix(lines::OPEN)?.split_once(" = "));
    let keys: Vec<&str> = open.map(|(key, _)| key).collect();
    if !keys.is_empty() {
        output::warning(&format!(
            "{} still has lines to fill in ({}): until they say what the program did, findings may be those of the file, and not \
             of the step; delete those that do not apply",
            file.display(),
            keys.join(", ")
        ));
    }
}

/// The text of the run file.
fn of(folder: &Folder) -> String {
    let program = Program::of(folder);
    let model = folder.model_lines();
    let adapter = folder.adapter_lines();
    let optimizer = folder.optimizer();
    // Groups by number are matched under a guess of the parameters without decay, which their number and shapes confirm.
    let drafts = groups::NO_DECAY.iter().map(|no_decay| draft(&model, &adapter, optimizer.name, no_decay));
    let mut found = Err(String::new());
    for text in drafts.filter(|_| model.is_known()) {
        found = match (saved(&text, folder), found) {
            (Ok(done), _) => Ok(done),
            // The first one supposes least.
            (Err(error), Err(first)) if first.is_empty() => Err(error.to_string()),
            (_, found) => found,
        };
        if found.is_ok() {
            break;
        }
    }
    let groups = match &found {
        Ok((_, saved)) if saved.settings.iter().all(BTreeMap::is_empty) && !folder.groups.is_empty() => {
            Groups::unmatched(folder, &program, "the optimizer has saved no tensors of them")
        }
        Ok((job, saved)) => {
            Groups::of(&job.plan.spec, saved, &program, job.config.train.optimizer.no_decay())
        }
        Err(reason) => Groups::unmatched(folder, &program, reason),
    };
    let steps = groups.steps.or(folder.steps);
    let schedule = program.schedule_lines(steps);
    let has_shape = program.has_shape();
    let file = RunFile {
        name: folder.path.display().to_string(),
        program: program.name,
        tables: vec![
            ("model", model),
            ("adapter", adapter),
            ("train", Lines([schedule, program.train].concat())),
            ("train.optimizer", Lines([vec![optimizer.line], groups.lines].concat())),
            ("fsdp", Lines([vec![program.dtype], groups.frozen].concat())),
        ],
        groups: groups.tables,
    };
    let text = file.text();
    if let Some(said) = steps.zip(groups.rate).filter(|_| has_shape) {
        expect_rate(&text, said);
    }
    text
}

/// Warns if the schedule of a run file gives another rate than the optimizer has saved for the step after `steps`.
fn expect_rate(text: &str, (steps, saved): (u64, f64)) {
    let Ok(loaded) = Resolved::parse_for_audit(text, "the run file") else { return };
    let train = loaded.config.train;
    let rate =
        LrSchedule::new(&train.lr_schedule, train.optimizer.lr().unwrap_or(0.0), train.steps).lr(steps);
    if (rate - saved).abs() > RATE_TOLERANCE * saved.abs() {
        output::warning(&format!(
            "the schedule of the run file gives {rate:e} for step {}, and the optimizer has saved {saved:e}: the program did \
             not use the schedule that its settings name",
            steps + 1
        ));
    }
}

/// Largest relative difference of two equal rates.
const RATE_TOLERANCE: f64 = 1e-9;

/// The least that finds parameters and moments: the model, its adapters and the kind of optimizer.
fn draft(model: &Lines, adapter: &Lines, optimizer: &str, no_decay: &[&str]) -> String {
    let adapter = match adapter.0.is_empty() {
        true => String::new(),
        false => format!("[adapter]\n{}", adapter.text()),
    };
    let no_decay: Vec<String> = no_decay.iter().map(|&pattern| pattern.to_owned()).collect();
    format!(
        "[model]\n{}\n{adapter}\n[train]\nsteps = 1\n[train.optimizer]\nname = \"{optimizer}\"\nweight_decay = 0\nno_decay = {}\n",
        model.text(),
        strings(&no_decay)
    )
}

/// The job of a draft, and the optimizer's settings for its parameters.
fn saved(draft: &str, folder: &Folder) -> Result<(Job<Model>, SavedOptimizer), CliError> {
    let (setup, _) = RunSetup::of(Resolved::parse_for_audit(draft, "the draft")?)?;
    let (setup, architecture, init) = super::prepared(&folder.path, setup)?;
    let job = Job::with_data(setup.config, architecture, init, Arc::new(RunData::none()))?;
    let saved = SavedOptimizer::read(&job, &folder.path)?;
    Ok((job, saved))
}

/// The names of a parameter, its own first.
fn names(spec: &ModelSpec, index: usize) -> impl Iterator<Item = &str> {
    let param = spec.param(ParamId(index));
    std::iter::once(&*param.fqn).chain(param.aliases.iter().map(String::as_str))
}
