//! A whole training run: the output folder, the steps of every rank, metrics, export.

mod divergence;
mod folder;
mod losses;
mod options;
mod rank_run;
mod run;
mod start;
mod step_clock;
mod warning;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fsdp_ckpt::export::Export;
use fsdp_ckpt::is_url;
use fsdp_ckpt::native::RunDir;
use fsdp_comm::launch::{Launcher, Seat};
use fsdp_config::WatchedLoss;
use fsdp_core::FailureKind;
use fsdp_core::comm::Traffic;
use fsdp_core::memory::Usage;
use fsdp_nn::Backend;
use fsdp_nn::model::Architecture;

use crate::adapter::merges;
use crate::adapter::peft::exported_file;
use crate::checkpoint::{SaveOptions, StateTable};
use crate::error::{Ending, Kept, TrainError};
use crate::events;
use crate::export::{Companions, plan_export};
use crate::job::Job;
use crate::memory::expect_room_to_train;
use crate::metrics::Evaluation;
use crate::rule;
use crate::wire_result;

pub use folder::{is_filled, is_output, not_empty};
pub use options::{Reporter, Resume, Resumed, RunOptions};
pub use start::base_of;
pub use warning::RunWarning;

use divergence::{Began, Divergence};
use folder::{ADAPTER, MODEL, MODEL_FILE};
use rank_run::run_rank;
use run::{Log, RankResult, Run};
use start::Start;

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Steps done, including those before a checkpoint that the run resumed from.
    pub steps: u64,
    /// Steps done by the checkpoint that the run resumed from; `None` if it did not resume.
    pub resumed_from: Option<u64>,
    /// Whether the run was stopped before all steps were done.
    pub stopped: bool,
    /// The lowest loss that `train.early_stop` saw; `None` if that did not end the run.
    pub early: Option<WatchedLoss>,
    /// The best of the states that `checkpoint.keep_best` keeps, with its checkpoint.
    pub best: Option<(WatchedLoss, PathBuf)>,
    /// Steps of this process that were skipped because gradients overflowed in f16.
    pub skipped: u64,
    /// Loss of the first step of this process.
    pub first_loss: f64,
    /// Loss of the last step.
    pub last_loss: f64,
    /// Median tokens per second over all steps but the first.
    pub tokens_per_s: f64,
    /// The results of the last evaluation, one per set.
    pub evaluations: Vec<Evaluation>,
    /// Wall time.
    pub elapsed: Duration,
    /// Memory usage of each rank of this process.
    pub usage: Vec<Usage>,
    /// Communication of each rank of this process.
    pub traffic: Vec<Traffic>,
    /// Path of the exported model, or of its adapters unless they were merged.
    pub model: PathBuf,
}

/// Topic on which the first process announces how the run ended.
const OUTCOME: &str = "outcome";

/// Trains a job and writes its output folder.
///
/// # Errors
/// [`TrainError`]: a stop was requested before the first step, there is not enough memory, the folder is not empty or
/// is in use, the checkpoint to resume from is damaged or belongs to another run; the first failure of any rank; or a
/// failure outside the computation ([`TrainError::Ended`], which says where the state is). No incomplete file keeps its
/// final name, and an exported model is replaced only by a complete one.
pub fn train<L: Launcher<Memory: Backend>, A: Architecture + Clone>(
    job: &Job<A>,
    launcher: &L,
    options: &RunOptions<'_>,
) -> Result<Summary, TrainError> {
    let world = job.plan.mesh.world();
    expect_room_to_train::<L::Memory, A>(job, launcher.ranks_on_machine(world))?;
    let out_dir = Path::new(&job.config.run.out_dir);
    let rule = rule::rule(&job.config.train, &job.plan.spec)?;
    let table = StateTable::new(&job.plan, &rule);
    let assembly = launcher.assemble(world);
    let start = Start::agree(job, &table, options, &*assembly)?;
    let (folder, file) = match &job.config.adapter {
        None => (MODEL, MODEL_FILE),
        Some(adapter) => (ADAPTER, exported_file(adapter)),
    };
    let export_dir = out_dir.join(folder);
    let plan = plan_export(&export_dir.join(file), job, options.config_json.as_deref())?;
    let create = || -> Result<Export, TrainError> {
        std::fs::create_dir_all(&export_dir).map_err(TrainError::io("create", &export_dir))?;
        Ok(plan.create()?)
    };
    let export = start.lock().filter(|_| !is_url(out_dir)).map(|_| create()).transpose()?;
    let saves = SaveOptions::new(job, table, Arc::clone(&assembly), start.attempt, start.lock().cloned())?;
    let saves = Arc::new(saves);
    let companions = match assembly.is_leader() {
        true => Companions::read(Path::new(&job.config.model.path))?,
        false => Companions::default(),
    };
    let run = Run::new(job, options, &start, &saves, &*assembly, (plan, export, companions));
    events::start(job, start.step);
    let begin = Instant::now();
    let launched = launcher.launch(world, &|seat: Seat<L::Memory>| run_rank(&run, seat));
    let cleared = run.clear(launched.is_ok());
    let began = || {
        let (step, lr) = (start.step, job.config.train.optimizer.lr());
        start.lock().map(|lock| Began { lock, step, lr })
    };
    let explain = |failure| {
        Divergence::of(start.explain(TrainError::from(failure), options), began(), &run.log().losses)
    };
    let ranks = launched.map_err(explain).inspect_err(|error| {
        // Where another try may help, the same command must be able to start it.
        if run.log().records.is_empty() && error.kind() == FailureKind::Temporary {
            start.unsettle(out_dir);
        }
    })?;
    let done = ranks[0].done;
    if assembly.is_leader() {
        let best = saves.best(&ranks[0].watched);
        let ended = conclude(&run, &saves, (done, &best), cleared);
        let ended =
            ended.and_then(|()| Ok(start.lock().map_or(Ok(()), |lock| lock.remove_other_attempts())?));
        let announced = assembly.announce(OUTCOME, wire_result::encode(ended.as_ref()));
        ended?;
        announced?;
        let exploded = began().and_then(|began| Divergence::at_end(done, &began, &run.log().losses));
        exploded.into_iter().for_each(|exploded| options.reporter.warn(&RunWarning::Exploded(exploded)));
    } else {
        let limit = Duration::from_secs_f64(job.config.run.timeout_s);
        wire_result::decode::<()>(&assembly.hear(OUTCOME, limit)?)?;
    }
    let model = if merges(&job.config) { out_dir.join(MODEL) } else { export_dir.clone() };
    Ok(summary(job, &start, run.into_log(), ranks, begin.elapsed(), model))
}

/// Concludes a run on the first rank, after all ranks have ended: fails if something outside the computation has
/// failed.
fn conclude<A: Architecture + Clone>(
    run: &Run<'_, A>,
    saves: &SaveOptions,
    (done, best): (u64, &[u64]),
    cleared: Result<(), fsdp_ckpt::Error>,
) -> Result<(), TrainError> {
    run.log().publish_metrics();
    if let Some(source) = run.collect_trouble() {
        let ending = ending(&run.log(), Path::new(&run.job.config.run.out_dir), done);
        return Err(TrainError::Ended { source: Box::new(source), ending });
    }
    cleared?;
    let mut log = run.log();
    if log.saved.is_some() {
        // Without an evaluation, no loss has been computed from the last weights.
        saves.prune(log.prove(done.saturating_sub(1)), best)?;
    }
    Ok(())
}

/// What became of the state of a run that writes to `out_dir` and was stopped after `done` steps.
fn ending(log: &Log, out_dir: &Path, done: u64) -> Ending {
    let checkpoints = out_dir.join(RunDir::CHECKPOINTS);
    let kept = |path: &PathBuf| match path.parent() == Some(&checkpoints) {
        true => Kept::InOutDir(path.clone()),
        false => Kept::Elsewhere(path.clone()),
    };
    let saved = log.saved.as_ref().filter(|saved| saved.step == done);
    Ending { done, state: saved.map(|saved| kept(&saved.path)).ok_or_else(|| log.not_saved.clone()) }
}

fn summary<A>(
    job: &Job<A>,
    start: &Start,
    log: Log,
    ranks: Vec<RankResult>,
    elapsed: Duration,
    model: PathBuf,
) -> Summary {
    let (records, done, is_over) = (&log.records, ranks[0].done, ranks[0].is_over);
    let lowest = WatchedLoss::from_lowest(&ranks[0].watched).first().copied();
    let is_early = is_over && done < job.config.train.steps;
    let mut speeds: Vec<f64> =
        records.iter().skip(usize::from(records.len() > 1)).map(|record| record.tokens_per_s).collect();
    speeds.sort_by(f64::total_cmp);
    Summary {
        steps: done,
        resumed_from: start.source.is_some().then_some(start.step),
        stopped: done < job.config.train.steps && !is_over,
        early: lowest.filter(|_| is_early),
        best: lowest
            .filter(|_| job.config.checkpoint.keep_best > 0)
            .map(|lowest| (lowest, RunDir::new(&job.config.run.out_dir).checkpoint(lowest.step))),
        skipped: records.iter().filter(|record| record.scaling.is_some_and(|scaling| scaling.skipped)).count()
            as u64,
        first_loss: records.first().map_or(f64::NAN, |record| record.loss),
        last_loss: records.last().map_or(f64::NAN, |record| record.loss),
        tokens_per_s: speeds.get(speeds.len() / 2).copied().unwrap_or(0.0),
        evaluations: log.evaluations,
        elapsed,
        usage: ranks.iter().map(|rank| rank.usage).collect(),
        traffic: ranks.iter().map(|rank| rank.traffic).collect(),
        model,
    }
}

#[cfg(test)]
mod tests;
