//! The run as each rank lives it: steps, with what is recorded, saved and evaluated between them.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fsdp_ckpt::export::{ExportPlan, Receipt};
use fsdp_comm::launch::Seat;
use fsdp_core::comm::Traffic;
use fsdp_core::engine::{Observer, ProgramOrder, StepReport};
use fsdp_core::memory::Usage;
use fsdp_nn::model::Architecture;

use super::RunOptions;
use crate::checkpoint::{RunState, SaveOptions, Saved, Saver, Start};
use crate::error::TrainError;
use crate::export::export_model;
use crate::job::Job;
use crate::metrics::{METRICS, MetricsWriter, StepMetrics};
use crate::rank::{Evaluation, RankTrainer};
use crate::rule::TrainBackend;

/// What one rank brings back.
pub(super) struct RankResult {
    pub(super) usage: Usage,
    pub(super) traffic: Traffic,
    pub(super) receipt: Option<Receipt>,
}

/// What the first rank notes.
#[derive(Default)]
pub(super) struct Log {
    /// There from the moment where the output folder is this run's.
    metrics: Option<MetricsWriter<std::io::BufWriter<std::fs::File>>>,
    pub(super) records: Vec<StepMetrics>,
    pub(super) evaluation: Option<Evaluation>,
}

/// What all ranks of a run share.
pub(super) struct Run<'a, A> {
    pub(super) job: &'a Job<A>,
    pub(super) options: &'a RunOptions<'a>,
    pub(super) log: &'a Mutex<Log>,
    pub(super) plan: &'a ExportPlan,
    pub(super) start: &'a Start,
    pub(super) saves: &'a Arc<SaveOptions>,
}

impl<A: Architecture + Clone> Run<'_, A> {
    /// Everything that one rank does.
    pub(super) fn rank<M: TrainBackend>(&self, seat: Seat<M>) -> Result<RankResult, TrainError> {
        let observer = (self.options.observer)(seat.rank);
        let mut trainer = match &self.start.source {
            Some(checkpoint) => RankTrainer::resume(self.job, seat, checkpoint)?,
            None => RankTrainer::new(self.job, seat)?,
        };
        // From here on nothing that was given can be at fault; only now is an earlier run replaced.
        trainer.meet()?;
        if self.start.gives_up(self.options.stop) {
            return Err(TrainError::Stopped);
        }
        if trainer.rank().0 == 0 {
            self.take_over()?;
        }
        let saver = Saver::of_rank(self.saves, self.job.plan.mesh, trainer.rank());
        let mut rank = RankRun { run: self, trainer, saver, observer, clock: Instant::now() };
        rank.steps()?;
        let receipt = export_model(rank.trainer.engine(), self.plan)?;
        rank.finish_save()?;
        Ok(RankResult { usage: rank.trainer.usage(), traffic: rank.trainer.traffic(), receipt })
    }

    /// Makes the output folder this run's.
    fn take_over(&self) -> Result<(), TrainError> {
        let out_dir = Path::new(&self.job.config.run.out_dir);
        let metrics = self.start.settle(out_dir, &self.job.config.to_toml())?;
        self.lock().metrics = Some(metrics);
        Ok(())
    }

    fn record(&self, step: u64, report: &StepReport, elapsed: Duration) -> Result<(), TrainError> {
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
            loss: report.loss,
            grad_norm: report.grad_norm,
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

    fn lock(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One rank on its way.
struct RankRun<'a, 'r, M: TrainBackend, A: Architecture + Clone> {
    run: &'r Run<'a, A>,
    trainer: RankTrainer<'a, M, A>,
    saver: Option<Saver>,
    observer: Box<dyn Observer>,
    /// When the step whose report is read next began, as far as the host can tell.
    clock: Instant,
}

impl<M: TrainBackend, A: Architecture + Clone> RankRun<'_, '_, M, A> {
    /// All steps, with the evaluations and saves between them.
    fn steps(&mut self) -> Result<(), TrainError> {
        let Run { job, options, start, .. } = self.run;
        let (steps, every) = (job.config.train.steps, job.config.data.eval_every);
        for step in start.step..steps {
            let done = step + 1;
            let is_due = job.config.checkpoint.is_due(done, steps);
            let evaluates = done == steps || (every > 0 && done.is_multiple_of(every));
            if self.trainer.unread() == 0 {
                self.clock = Instant::now();
            }
            let stop = options.stop.load(Ordering::Relaxed);
            self.trainer.issue(step, stop, &mut ProgramOrder, &mut *self.observer)?;
            // The host goes ahead of a device that works behind it, by one step, but not past what reads the state.
            let is_behind = self.trainer.engine().memory().is_asynchronous();
            let mut stop = self.read_until(usize::from(is_behind && !is_due && !evaluates))?;
            if stop {
                self.read_until(0)?;
            }
            let is_saved = stop || is_due;
            if is_saved {
                self.save(done)?;
            }
            let saved = self.saver.as_mut().map_or(Ok(None), Saver::poll)?;
            self.tell(saved);
            stop |= evaluates && self.evaluate(done)?;
            if stop && !is_saved {
                self.save(done)?;
            }
            if stop {
                return Ok(());
            }
        }
        if start.step == steps {
            self.evaluate(steps)?;
        }
        Ok(())
    }

    /// Reads the reports of steps until no more than `unread` are left; returns whether some rank asked to stop.
    fn read_until(&mut self, unread: usize) -> Result<bool, TrainError> {
        let mut stop = false;
        while self.trainer.unread() > unread {
            let (step, report) = match self.trainer.report() {
                // The state before that step is sound: what is being saved of it becomes complete. All ranks are
                // here, so all have begun it.
                Err(error @ TrainError::NotFinite { .. }) => {
                    let saved = self.saver.as_mut().and_then(|saver| saver.finish().ok()?);
                    self.tell(saved);
                    return Err(error);
                }
                other => other?.expect("a step is unread"),
            };
            if self.trainer.rank().0 == 0 {
                self.run.record(step, &report, self.clock.elapsed())?;
            }
            self.clock = Instant::now();
            stop |= report.stop;
        }
        Ok(stop)
    }

    /// Saves the state after `step` steps. Loss and norm of the last one are known to be finite: otherwise the
    /// step would have been an error.
    fn save(&mut self, step: u64) -> Result<(), TrainError> {
        if let Some(saver) = &mut self.saver {
            let model = self.run.options.config_json.as_deref();
            let state = RunState::of(self.run.job, step, model, &self.run.start.changes);
            let saved = saver.save(self.trainer.engine(), &state)?;
            self.tell(saved);
        }
        if self.run.job.config.checkpoint.is_async { Ok(()) } else { self.finish_save() }
    }

    /// Waits for the save under way.
    fn finish_save(&mut self) -> Result<(), TrainError> {
        self.trainer.meet()?;
        let saved = self.saver.as_mut().map_or(Ok(None), Saver::finish)?;
        self.tell(saved);
        Ok(())
    }

    fn tell(&self, saved: Option<Saved>) {
        if let Some(saved) = saved.filter(|_| self.trainer.rank().0 == 0) {
            self.run.options.reporter.saved(&saved);
        }
    }

    /// Evaluates; returns whether some rank asked to stop before it was done.
    fn evaluate(&mut self, step: u64) -> Result<bool, TrainError> {
        let evaluation =
            self.trainer.evaluate(self.run.options.stop, &mut ProgramOrder, &mut *self.observer)?;
        let Some(evaluation) = evaluation else { return Ok(false) };
        if self.trainer.rank().0 == 0 && !evaluation.stop {
            self.run.options.reporter.evaluation(step, &evaluation);
            self.run.lock().evaluation = Some(evaluation);
        }
        Ok(evaluation.stop)
    }
}
