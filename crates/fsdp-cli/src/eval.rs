//! `fsdp eval`.

use std::path::Path;

use fsdp_comm::launch::Launcher;
use fsdp_comm::process::cluster::Cluster;
use fsdp_config::Init;
use fsdp_data::Watch;
use fsdp_nn::Backend;
use fsdp_nn::hf::HfConfig;
use fsdp_train::adapter::peft;
use fsdp_train::checkpoint::SavedModel;
use fsdp_train::evaluate::{Evaluated, evaluate};
use fsdp_train::{Evaluation, Job, TrainError};
use serde_json::{Value, json};

use crate::args::{EvalArgs, RunFileArgs};
use crate::cluster::Team;
use crate::device::{Purpose, Work};
use crate::document::{Document, Report, print};
use crate::error::CliError;
use crate::exit_code::Exit;
use crate::run_setup::{self, Model, RunSetup};
use crate::stop_signal::StopSignal;
use crate::token_progress::TokenProgress;
use crate::train::{EVALUATION_HEADER, evaluation_row};
use crate::units::clock;
use crate::{cluster, device, logging, output};

/// Evaluates a model on the evaluation sets of a run file and prints the results.
///
/// # Errors
/// [`CliError`]: the input is wrong, or the evaluation failed.
pub(crate) fn run(args: &EvalArgs) -> Result<Exit, CliError> {
    // There is nothing to save: every signal ends the process at once.
    let _signal = StopSignal::install_idle()?;
    let place = cluster::place()?;
    let (setup, saved) = load(args)?;
    logging::install(None)?;
    cluster::within(place, &setup.config.run, args.network, |team| {
        run_within(args, &setup, saved.as_ref(), team)
    })
}

/// Loads the run file with the given model instead of its own; a checkpoint is also returned, opened.
fn load(args: &EvalArgs) -> Result<(RunSetup, Option<SavedModel>), CliError> {
    let dir = &args.model;
    if let Some(saved) = SavedModel::open(dir)? {
        let mut setup = RunSetup::load(&args.run)?;
        setup.config.adapter = saved.adapter()?;
        if let Some(text) = saved.config_json() {
            let origin = dir.display().to_string();
            setup.model = HfConfig::parse(text).map_err(|source| CliError::Model { origin, source })?;
        }
        return Ok((setup, Some(saved)));
    }
    if dir.join(peft::CONFIG_FILE).exists() {
        let mut setup = RunSetup::load(&args.run)?;
        let Some(adapter) = &mut setup.config.adapter else {
            let what = format!(
                "{} is an adapter, and the run file has no [adapter]; add that table, with the rank and alpha of the \
                 adapter, and its base as model.path",
                dir.display()
            );
            return Err(CliError::Option { option: "--model", what });
        };
        (adapter.path, adapter.merge) = (Some(dir.display().to_string()), false);
        return Ok((setup, None));
    }
    run_setup::expect_model(
        "--model",
        dir,
        ", an adapter or a checkpoint, such as what is in the folder of a run",
    )?;
    let path = toml::Value::String(dir.display().to_string());
    let mut run: RunFileArgs = args.run.clone();
    run.overrides.push(format!("model.path={path}"));
    let mut setup = RunSetup::load(&run)?;
    setup.config.model.init = Init::Pretrained;
    // The model is evaluated without an adapter.
    setup.config.adapter = None;
    Ok((setup, None))
}

fn run_within(
    args: &EvalArgs,
    setup: &RunSetup,
    saved: Option<&SavedModel>,
    team: Option<Team<'_>>,
) -> Result<Exit, CliError> {
    let cluster = team.map(|team| team.cluster);
    device::expect_run(&setup.config.run)?;
    let architecture = setup.build()?;
    // A checkpoint has all weights except those of a base model.
    let init = match saved {
        Some(_) if setup.config.adapter.is_none() => run_setup::random(0, &architecture),
        _ => setup.init(&architecture, saved.and_then(SavedModel::base_from))?,
    };
    let read = || {
        let progress = TokenProgress::new();
        let report_progress = |now| progress.update(now);
        Ok::<_, CliError>(Job::to_evaluate(
            setup.config.clone(),
            architecture,
            init,
            &Watch::new(&report_progress),
        )?)
    };
    let job = cluster::in_turns(team, read, |job| job.data.share())?;
    output::data_warnings(&job.data);
    let found = device::on(&job.config.run, Purpose::Training, cluster, Evaluating { job: &job, saved })??;
    if cluster.is_none_or(Cluster::is_leader) {
        print(&Evaluations { model: &args.model, found: &found }, args.json)?;
    }
    Ok(Exit::Done)
}

/// Evaluates on any device.
struct Evaluating<'a> {
    job: &'a Job<Model>,
    saved: Option<&'a SavedModel>,
}

impl Work for Evaluating<'_> {
    type Outcome = Result<Evaluated, TrainError>;

    fn on<L: Launcher>(self, launcher: &L) -> Self::Outcome
    where
        L::Memory: Backend,
    {
        evaluate(self.job, launcher, self.saved)
    }
}

/// The results for a model.
struct Evaluations<'a> {
    model: &'a Path,
    found: &'a Evaluated,
}

impl Report for Evaluations<'_> {
    fn json(&self) -> Value {
        let set = |evaluation: &Evaluation| {
            let Evaluation { set, loss, targets } = evaluation;
            // JSON has no number for a perplexity that overflows a double.
            json!({ "set": set, "loss": loss, "perplexity": evaluation.perplexity(), "tokens": targets })
        };
        let (model, seconds) = (self.model.display().to_string(), self.found.elapsed.as_secs_f64());
        let sets: Vec<_> = self.found.evaluations.iter().map(set).collect();
        json!({ "model": model, "evaluations": sets, "seconds": seconds })
    }

    fn write(&self, to: &mut dyn Document) {
        to.line(&format!("{}, in {}", self.model.display(), clock(self.found.elapsed)));
        to.table_of_any(EVALUATION_HEADER, self.found.evaluations.iter().map(evaluation_row));
    }
}
