//! A whole training run: the output folder, the loop over steps on every rank, metrics, export.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fsdp_ckpt::export::{ExportPlan, Receipt};
use fsdp_comm::launch::{Launcher, Seat};
use fsdp_core::DType;
use fsdp_core::comm::Traffic;
use fsdp_core::engine::{Observer, ProgramOrder};
use fsdp_core::memory::Usage;
use fsdp_nn::model::Architecture;

use crate::checkpoint::{Resume, Resumed, RunState, SaveOptions, Saved, Saver, Start, StateTable};
use crate::error::TrainError;
use crate::export::{export_model, plan_export};
use crate::job::Job;
use crate::metrics::{FlopModel, MetricsWriter, StepMetrics};
use crate::rank::{Evaluation, RankTrainer};
use crate::rule::TrainBackend;

/// One object per step, in the output folder.
const METRICS: &str = "metrics.jsonl";

/// What a run tells while it goes on. Called on the first rank only.
pub trait Reporter: Sync {
    /// A step is done.
    fn step(&self, _metrics: &StepMetrics) {}

    /// An evaluation after `step` steps is done.
    fn evaluation(&self, _step: u64, _evaluation: &Evaluation) {}

    /// The run goes on from a checkpoint; or none was found, and it begins.
    fn resumed(&self, _resumed: Option<&Resumed>) {}

    /// A checkpoint is complete.
    fn saved(&self, _saved: &Saved) {}
}

impl Reporter for () {}

/// What a caller decides about a run besides its configuration.
pub struct RunOptions<'a> {
    /// Told about progress.
    pub reporter: &'a dyn Reporter,
    /// Raised to stop after the step under way: all ranks agree on the step.
    pub stop: &'a AtomicBool,
    /// Whether the run goes on from a checkpoint.
    pub resume: Resume,
    /// Replace the content of a non-empty output folder.
    pub overwrite: bool,
    /// Makes the observer of each rank's operations.
    pub observer: &'a (dyn Fn(fsdp_core::Rank) -> Box<dyn Observer> + Sync),
    /// The text of `config.json` to put beside the exported weights, if the model has one.
    pub config_json: Option<String>,
    /// What the FLOPs of a token depend on, where utilization is asked for.
    pub flops: Option<FlopModel>,
}

/// What a finished run found.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Steps done, those before a checkpoint that the run went on from included.
    pub steps: u64,
    /// Steps that the checkpoint had done, if the run went on from one.
    pub resumed_from: Option<u64>,
    /// Whether it was stopped before all steps were done.
    pub stopped: bool,
    /// Loss of the first step of this process.
    pub first_loss: f64,
    /// Loss of the last step.
    pub last_loss: f64,
    /// Median tokens per second over all steps but the first.
    pub tokens_per_s: f64,
    /// The last evaluation.
    pub evaluation: Option<Evaluation>,
    /// Wall time.
    pub elapsed: Duration,
    /// What each rank's memory counted.
    pub usage: Vec<Usage>,
    /// What each rank communicated.
    pub traffic: Vec<Traffic>,
    /// Where the model was exported to.
    pub model: PathBuf,
}

/// Trains a job and writes its output folder.
///
/// # Errors
/// [`TrainError`]: the folder is not empty or in use, the checkpoint to go on from is damaged or of another
/// run, or the first failure of any rank. Nothing half-written stays under a final name, and an exported model
/// is replaced only by a complete one.
pub fn train<L, A>(job: &Job<A>, launcher: &L, options: &RunOptions<'_>) -> Result<Summary, TrainError>
where
    L: Launcher,
    L::Memory: TrainBackend,
    A: Architecture + Clone,
{
    let out_dir = Path::new(&job.config.run.out_dir);
    let rule = L::Memory::rule(&job.config.train.optimizer, &job.plan.spec)?;
    let table = StateTable::new(&job.plan, &*rule);
    let start = Start::prepare(job, &table, options)?;
    let model = out_dir.join("model");
    std::fs::create_dir_all(&model).map_err(TrainError::io("create", &model))?;
    let plan = plan_export(&model.join("model.safetensors"), &job.plan.spec, export_dtype(job))?;
    let export = plan.create()?;
    let saves = Arc::new(SaveOptions::new(job, table, Arc::clone(&start.lock))?);
    let log = Mutex::new(Log::default());
    let begin = Instant::now();
    let run = Run { job, options, log: &log, plan: &plan, start: &start, saves: &saves };
    let ranks = launcher.launch(job.plan.mesh.world(), &|seat: Seat<L::Memory>| run.rank(seat))?;
    export.commit(ranks.iter().filter_map(|rank| rank.receipt.clone()))?;
    if let Some(text) = &options.config_json {
        write_whole(&model.join("config.json"), text)?;
    }
    let log = log.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    Ok(summary(job, &start, log, ranks, begin.elapsed(), model))
}

/// What one rank brings back.
struct RankResult {
    usage: Usage,
    traffic: Traffic,
    receipt: Option<Receipt>,
}

#[derive(Default)]
struct Log {
    /// There from the moment where the output folder is this run's.
    metrics: Option<MetricsWriter<std::io::BufWriter<std::fs::File>>>,
    records: Vec<StepMetrics>,
    evaluation: Option<Evaluation>,
}

struct Run<'a, A> {
    job: &'a Job<A>,
    options: &'a RunOptions<'a>,
    log: &'a Mutex<Log>,
    plan: &'a ExportPlan,
    start: &'a Start,
    saves: &'a Arc<SaveOptions>,
}

impl<A: Architecture + Clone> Run<'_, A> {
    fn rank<M: TrainBackend>(&self, seat: Seat<M>) -> Result<RankResult, TrainError> {
        let mut observer = (self.options.observer)(seat.rank);
        let mut trainer = match &self.start.source {
            Some(checkpoint) => RankTrainer::resume(self.job, seat, checkpoint)?,
            None => RankTrainer::new(self.job, seat)?,
        };
        // From here on nothing that was given can be at fault; only now is an earlier run replaced.
        trainer.meet()?;
        if trainer.rank().0 == 0 {
            self.take_over()?;
        }
        let mut saver = Saver::of_rank(self.saves, self.job.plan.mesh, trainer.rank());
        self.steps(&mut trainer, &mut saver, &mut *observer)?;
        let receipt = export_model(trainer.engine(), self.plan)?;
        self.finish(&mut saver, &mut trainer)?;
        Ok(RankResult { usage: trainer.usage(), traffic: trainer.traffic(), receipt })
    }

    /// Makes the output folder this run's.
    fn take_over(&self) -> Result<(), TrainError> {
        let out_dir = Path::new(&self.job.config.run.out_dir);
        self.start.settle(out_dir)?;
        write_whole(&out_dir.join("resolved.toml"), &self.job.config.to_toml())?;
        let path = out_dir.join(METRICS);
        let metrics =
            MetricsWriter::resume(&path, self.start.step).map_err(TrainError::io("write", &path))?;
        self.lock().metrics = Some(metrics);
        Ok(())
    }

    /// All steps, with the evaluations and saves between them.
    fn steps<M: TrainBackend>(
        &self,
        trainer: &mut RankTrainer<'_, M, A>,
        saver: &mut Option<Saver>,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let config = &self.job.config;
        let (steps, every) = (config.train.steps, config.data.eval_every);
        for step in self.start.step..steps {
            let begin = Instant::now();
            let stop = self.options.stop.load(Ordering::Relaxed);
            let report = match trainer.step(step, stop, &mut ProgramOrder, observer) {
                // The state before this step is sound: what is being saved of it becomes complete. All ranks are
                // here, so all have begun it.
                Err(error @ TrainError::NotFinite { .. }) => {
                    self.tell(trainer, saver.as_mut().and_then(|saver| saver.finish().ok()?));
                    return Err(error);
                }
                other => other?,
            };
            let done = step + 1;
            if trainer.rank().0 == 0 {
                self.record(step, report.loss, report.grad_norm, begin.elapsed())?;
            }
            let is_saved = report.stop || config.checkpoint.is_due(done, steps);
            if is_saved {
                self.save(saver, trainer, done)?;
            }
            self.tell(trainer, saver.as_mut().map_or(Ok(None), Saver::poll)?);
            let evaluates = done == steps || (every > 0 && done.is_multiple_of(every));
            let stops = report.stop || (evaluates && self.evaluate(trainer, done, observer)?);
            if stops && !is_saved {
                self.save(saver, trainer, done)?;
            }
            if stops {
                return Ok(());
            }
        }
        if self.start.step == steps {
            self.evaluate(trainer, steps, observer)?;
        }
        Ok(())
    }

    /// Saves the state after `step` steps. Loss and norm of the last one are known to be finite: otherwise the
    /// step would have been an error.
    fn save<M: TrainBackend>(
        &self,
        saver: &mut Option<Saver>,
        trainer: &mut RankTrainer<'_, M, A>,
        step: u64,
    ) -> Result<(), TrainError> {
        if let Some(saver) = saver {
            let model = self.options.config_json.as_deref();
            let run = RunState::of(self.job, step, model, &self.start.changes);
            self.tell(trainer, saver.save(trainer.engine(), &run)?);
        }
        if self.job.config.checkpoint.is_async { Ok(()) } else { self.finish(saver, trainer) }
    }

    /// Waits for the save under way.
    fn finish<M: TrainBackend>(
        &self,
        saver: &mut Option<Saver>,
        trainer: &mut RankTrainer<'_, M, A>,
    ) -> Result<(), TrainError> {
        trainer.meet()?;
        self.tell(trainer, saver.as_mut().map_or(Ok(None), Saver::finish)?);
        Ok(())
    }

    fn tell<M: TrainBackend>(&self, trainer: &RankTrainer<'_, M, A>, saved: Option<Saved>) {
        if let Some(saved) = saved.filter(|_| trainer.rank().0 == 0) {
            self.options.reporter.saved(&saved);
        }
    }

    /// Evaluates; returns whether some rank asked to stop before it was done.
    fn evaluate<M: TrainBackend>(
        &self,
        trainer: &mut RankTrainer<'_, M, A>,
        step: u64,
        observer: &mut dyn Observer,
    ) -> Result<bool, TrainError> {
        let evaluation = trainer.evaluate(self.options.stop, &mut ProgramOrder, observer)?;
        let Some(evaluation) = evaluation else { return Ok(false) };
        if trainer.rank().0 == 0 && !evaluation.stop {
            self.options.reporter.evaluation(step, &evaluation);
            self.lock().evaluation = Some(evaluation);
        }
        Ok(evaluation.stop)
    }

    fn record(&self, step: u64, loss: f64, grad_norm: f64, elapsed: Duration) -> Result<(), TrainError> {
        let config = &self.job.config;
        let tokens = (config.train.global_batch_size * config.data.seq_len) as u64;
        let tokens_per_s = tokens as f64 / elapsed.as_secs_f64();
        let utilization = config
            .run
            .peak_tflops
            .zip(self.options.flops)
            .map(|(peak, flops)| flops.utilization(tokens_per_s, self.job.plan.mesh.world(), peak));
        let metrics = StepMetrics {
            step: step + 1,
            loss,
            grad_norm,
            lr: self.job.schedule.lr(step),
            tokens,
            tokens_per_s,
            step_ms: elapsed.as_secs_f64() * 1e3,
            utilization,
        };
        let mut log = self.lock();
        let writer = log.metrics.as_mut().expect("the folder was taken over before the first step");
        let path = Path::new(&config.run.out_dir).join(METRICS);
        writer.write(&metrics).map_err(TrainError::io("write", path))?;
        self.options.reporter.step(&metrics);
        log.records.push(metrics);
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn export_dtype<A>(job: &Job<A>) -> DType {
    job.plan.policy.param_dtype.master()
}

fn summary<A>(
    job: &Job<A>,
    start: &Start,
    log: Log,
    ranks: Vec<RankResult>,
    elapsed: Duration,
    model: PathBuf,
) -> Summary {
    let records = &log.records;
    let mut speeds: Vec<f64> =
        records.iter().skip(usize::from(records.len() > 1)).map(|record| record.tokens_per_s).collect();
    speeds.sort_by(f64::total_cmp);
    let done = start.step + records.len() as u64;
    Summary {
        steps: done,
        resumed_from: start.source.is_some().then_some(start.step),
        stopped: done < job.config.train.steps,
        first_loss: records.first().map_or(f64::NAN, |record| record.loss),
        last_loss: records.last().map_or(f64::NAN, |record| record.loss),
        tokens_per_s: speeds.get(speeds.len() / 2).copied().unwrap_or(0.0),
        evaluation: log.evaluation,
        elapsed,
        usage: ranks.iter().map(|rank| rank.usage).collect(),
        traffic: ranks.iter().map(|rank| rank.traffic).collect(),
        model,
    }
}

/// Writes a file beside its name and renames it, so that it is whole or absent.
fn write_whole(path: &Path, text: &str) -> Result<(), TrainError> {
    let temporary = path.with_extension("tmp");
    std::fs::write(&temporary, text).map_err(TrainError::io("write", &temporary))?;
    std::fs::rename(&temporary, path).map_err(TrainError::io("rename", path))
}
