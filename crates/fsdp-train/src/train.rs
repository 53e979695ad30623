//! A whole training run: the output folder, the loop over steps on every rank, metrics, export.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fsdp_ckpt::export::{ExportPlan, Receipt};
use fsdp_comm::launch::{Launcher, Seat};
use fsdp_core::DType;
use fsdp_core::comm::Traffic;
use fsdp_core::engine::{Observer, ProgramOrder};
use fsdp_core::memory::Usage;
use fsdp_nn::model::Architecture;

use crate::error::TrainError;
use crate::export::{export_model, plan_export};
use crate::job::Job;
use crate::metrics::{FlopModel, MetricsWriter, StepMetrics};
use crate::rank::{Evaluation, RankTrainer};
use crate::rule::TrainBackend;

/// What a run tells while it goes on. Called on the first rank only.
pub trait Reporter: Sync {
    /// A step is done.
    fn step(&self, _metrics: &StepMetrics) {}

    /// An evaluation after `step` steps is done.
    fn evaluation(&self, _step: u64, _evaluation: &Evaluation) {}
}

impl Reporter for () {}

/// What a caller decides about a run besides its configuration.
pub struct RunOptions<'a> {
    /// Told about progress.
    pub reporter: &'a dyn Reporter,
    /// Raised to stop after the step under way: all ranks agree on the step.
    pub stop: &'a AtomicBool,
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
    /// Steps done.
    pub steps: u64,
    /// Whether it was stopped before all steps were done.
    pub stopped: bool,
    /// Loss of the first step.
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
/// [`TrainError`]: the folder is not empty, or the first failure of any rank. Nothing half-written stays
/// under a final name.
pub fn train<L, A>(job: &Job<A>, launcher: &L, options: &RunOptions<'_>) -> Result<Summary, TrainError>
where
    L: Launcher,
    L::Memory: TrainBackend,
    A: Architecture + Clone,
{
    let out_dir = Path::new(&job.config.run.out_dir);
    prepare(out_dir, options.overwrite)?;
    let resolved = out_dir.join("resolved.toml");
    std::fs::write(&resolved, job.config.to_toml()).map_err(TrainError::io("write", &resolved))?;
    let metrics_path = out_dir.join("metrics.jsonl");
    let metrics = MetricsWriter::create(&metrics_path).map_err(TrainError::io("create", &metrics_path))?;
    let model = out_dir.join("model");
    std::fs::create_dir_all(&model).map_err(TrainError::io("create", &model))?;
    let plan = plan_export(&model.join("model.safetensors"), &job.plan.spec, export_dtype(job))?;
    let export = plan.create()?;
    let log = Mutex::new(Log { metrics, path: metrics_path, records: Vec::new(), evaluation: None });
    let start = Instant::now();
    let run = Run { job, options, log: &log, plan: &plan };
    let ranks = launcher.launch(job.plan.mesh.world(), &|seat: Seat<L::Memory>| run.rank(seat))?;
    export.commit(ranks.iter().filter_map(|rank| rank.receipt.clone()))?;
    if let Some(text) = &options.config_json {
        write_whole(&model.join("config.json"), text)?;
    }
    let log = log.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    Ok(summary(job, log, ranks, start.elapsed(), model))
}

/// What one rank brings back.
struct RankResult {
    usage: Usage,
    traffic: Traffic,
    receipt: Option<Receipt>,
}

struct Log {
    metrics: MetricsWriter<std::io::BufWriter<std::fs::File>>,
    path: PathBuf,
    records: Vec<StepMetrics>,
    evaluation: Option<Evaluation>,
}

struct Run<'a, A> {
    job: &'a Job<A>,
    options: &'a RunOptions<'a>,
    log: &'a Mutex<Log>,
    plan: &'a ExportPlan,
}

impl<A: Architecture + Clone> Run<'_, A> {
    fn rank<M: TrainBackend>(&self, seat: Seat<M>) -> Result<RankResult, TrainError> {
        let mut observer = (self.options.observer)(seat.rank);
        let mut trainer = RankTrainer::new(self.job, seat)?;
        let config = &self.job.config;
        for step in 0..config.train.steps {
            let start = Instant::now();
            let stop = self.options.stop.load(Ordering::Relaxed);
            let report = trainer.step(step, stop, &mut ProgramOrder, &mut *observer)?;
            if trainer.rank().0 == 0 {
                self.record(step, report.loss, report.grad_norm, start.elapsed())?;
            }
            let last = step + 1 == config.train.steps || report.stop;
            let every = config.data.eval_every;
            if last || (every > 0 && (step + 1).is_multiple_of(every)) {
                self.evaluate(&mut trainer, step + 1, &mut *observer)?;
            }
            if report.stop {
                break;
            }
        }
        let receipt = export_model(trainer.engine(), self.plan)?;
        Ok(RankResult { usage: trainer.usage(), traffic: trainer.traffic(), receipt })
    }

    fn evaluate<M: TrainBackend>(
        &self,
        trainer: &mut RankTrainer<'_, M, A>,
        step: u64,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let Some(evaluation) = trainer.evaluate(false, &mut ProgramOrder, observer)? else { return Ok(()) };
        if trainer.rank().0 == 0 {
            self.options.reporter.evaluation(step, &evaluation);
            self.lock().evaluation = Some(evaluation);
        }
        Ok(())
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
        let path = log.path.clone();
        log.metrics.write(&metrics).map_err(TrainError::io("write", path))?;
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

fn summary<A>(job: &Job<A>, log: Log, ranks: Vec<RankResult>, elapsed: Duration, model: PathBuf) -> Summary {
    let records = &log.records;
    let mut speeds: Vec<f64> =
        records.iter().skip(usize::from(records.len() > 1)).map(|record| record.tokens_per_s).collect();
    speeds.sort_by(f64::total_cmp);
    Summary {
        steps: records.len() as u64,
        stopped: (records.len() as u64) < job.config.train.steps,
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

/// Makes the output folder, empty.
fn prepare(out_dir: &Path, overwrite: bool) -> Result<(), TrainError> {
    let is_filled = match std::fs::read_dir(out_dir) {
        Ok(mut entries) => entries.next().is_some(),
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => false,
        Err(source) => return Err(TrainError::io("open", out_dir)(source)),
    };
    if is_filled && !overwrite {
        return Err(TrainError::OutDirNotEmpty { path: out_dir.into() });
    }
    if is_filled {
        for name in ["metrics.jsonl", "resolved.toml", "model"] {
            let path = out_dir.join(name);
            let removed =
                if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            match removed {
                Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                    return Err(TrainError::io("remove", path)(source));
                }
                _ => {}
            }
        }
    }
    std::fs::create_dir_all(out_dir).map_err(TrainError::io("create", out_dir))
}

/// Writes a file beside its name and renames it, so that it is whole or absent.
fn write_whole(path: &Path, text: &str) -> Result<(), TrainError> {
    let temporary = path.with_extension("json.tmp");
    std::fs::write(&temporary, text).map_err(TrainError::io("write", &temporary))?;
    std::fs::rename(&temporary, path).map_err(TrainError::io("rename", path))
}
