//! State shared by the ranks of a run: the output folder, the log of the first rank, the export, and the reasons to
//! stop.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fsdp_ckpt::export::{Export, ExportPlan, Receipt};
use fsdp_comm::assembly::Assembly;
use fsdp_config::WatchedLoss;
use fsdp_core::Rank;
use fsdp_core::comm::Traffic;
use fsdp_core::engine::StepReport;
use fsdp_core::memory::Usage;
use fsdp_nn::model::{Architecture, Counted};

use super::folder::{ADAPTER, MODEL, MODEL_FILE};
use super::losses::Losses;
use super::options::RunOptions;
use super::start::Start;
use super::warning::RunWarning;
use crate::adapter::{merges, peft};
use crate::atomic_file::write_small;
use crate::checkpoint::{Outcome, SaveOptions, Saved, Source};
use crate::error::TrainError;
use crate::events::{self, SlowRank};
use crate::export::{Companions, export_checkpoint, export_merged, export_stacked};
use crate::job::Job;
use crate::loss_scale::LossScale;
use crate::metrics::{
    self, EvalMetrics, Evaluation, MetricsServer, ProcessTable, Recorder, Scaling, StepMetrics, Waiting,
};
use crate::wire_result;

/// Topic on which ranks give the receipts of their exports.
const RECEIPTS: &str = "receipts";

/// Topic on which ranks report that they have ended.
const ENDS: &str = "ends";

/// Topic on which the first rank announces whether it has exported the model.
const EXPORTED: &str = "exported";

/// How long ranks wait for the first one to export the model.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// The result of one rank.
pub(super) struct RankResult {
    pub(super) usage: Usage,
    pub(super) traffic: Traffic,
    /// Steps done.
    pub(super) done: u64,
    /// The watched losses.
    pub(super) watched: Vec<WatchedLoss>,
    /// Whether early stopping ended the run.
    pub(super) is_over: bool,
}

/// The records of a run, kept by the first rank of this process unless noted otherwise.
pub(super) struct Log {
    /// On the first rank of the world, from taking over the output folder until writing to it fails.
    metrics: Option<Recorder>,
    pub(super) records: Vec<StepMetrics>,
    /// The rank that others wait for, on the first rank of the world.
    slow: SlowRank,
    /// The results of the last evaluation, on all sets.
    pub(super) evaluations: Vec<Evaluation>,
    /// The training losses so far, on the first rank of the world including those of earlier starts.
    pub(super) losses: Losses,
    /// The last step whose weights are known to give a sound loss; 0 if none is.
    proven: u64,
    /// The newest checkpoint saved by this run.
    pub(super) saved: Option<Saved>,
    /// The error of the last failed save.
    pub(super) not_saved: Option<String>,
    /// The first failure outside the computation. All ranks stop after the current step, save their state and export.
    pub(super) trouble: Option<TrainError>,
    /// The files that receive the exported model, in the process of the first rank.
    export: Option<Export>,
}

/// The state shared by the ranks of a run in this process.
pub(super) struct Run<'a, A> {
    pub(super) job: &'a Job<A>,
    pub(super) options: &'a RunOptions<'a>,
    pub(super) start: &'a Start,
    pub(super) saves: &'a Arc<SaveOptions>,
    pub(super) assembly: &'a dyn Assembly,
    /// The layout of the exported model's files.
    pub(super) plan: ExportPlan,
    /// Files to copy beside the exported model, in the process of the first rank.
    companions: Companions,
    log: Mutex<Log>,
}

impl<'a, A: Architecture + Clone> Run<'a, A> {
    /// Creates a run that is about to start.
    pub(super) fn new(
        job: &'a Job<A>,
        options: &'a RunOptions<'a>,
        start: &'a Start,
        saves: &'a Arc<SaveOptions>,
        assembly: &'a dyn Assembly,
        (plan, export, companions): (ExportPlan, Option<Export>, Companions),
    ) -> Self {
        let log = Mutex::new(Log::new(Losses::new(job.architecture.head().vocab), export));
        Self { job, options, start, saves, assembly, plan, companions, log }
    }

    /// The records so far.
    pub(super) fn log(&self) -> MutexGuard<'_, Log> {
        // A panic cannot leave data under the lock half-changed.
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The final records.
    pub(super) fn into_log(self) -> Log {
        self.log.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this process wants the run to stop.
    pub(super) fn should_stop(&self) -> bool {
        self.options.stop.load(Ordering::Relaxed) || self.log().trouble.is_some()
    }

    /// Takes over the output folder, and reserves disk space for the first save.
    pub(super) fn take_over(&self) -> Result<(), TrainError> {
        // A run without steps saves nothing.
        let reserve =
            || if self.start.step < self.job.config.train.steps { self.saves.reserve() } else { Ok(()) };
        // Nothing is changed until there is known to be room, which may include the space of an earlier run.
        if self.options.overwrite {
            self.saves.expect_room_after_clearing()?;
        } else {
            reserve()?;
        }
        let mut metrics = self.start.settle(&self.job.config)?;
        metrics.start(self.start.step, &self.process_table())?;
        self.serve_metrics(&mut metrics);
        self.options.reporter.taken_over();
        if self.options.overwrite {
            reserve()?;
        }
        let mut log = self.log();
        log.losses.begin_with(metrics.take_losses());
        log.proven = log.losses.newest_sound(self.start.step);
        log.metrics = Some(metrics);
        drop(log);
        self.job.data.keep().for_each(|warning| self.options.reporter.warn(&RunWarning::Data(warning)));
        Ok(())
    }

    /// Opens the Prometheus endpoint, if configured. If that fails, the run continues.
    fn serve_metrics(&self, metrics: &mut Recorder) {
        let Some(address) = self.job.config.run.metrics_listen else { return };
        match MetricsServer::listen(address, self.job.config.train.steps, self.start.step) {
            Ok(exposition) => {
                events::listening(exposition.address());
                metrics.expose(exposition);
            }
            Err(error) => {
                let fault = error.to_string();
                self.options.reporter.warn(&RunWarning::NotListening { address, fault });
            }
        }
    }

    fn process_table(&self) -> ProcessTable {
        let alone = || ProcessTable::alone(self.job.config.run.device.name(), self.job.plan.mesh.world());
        self.options.process_table.clone().unwrap_or_else(alone)
    }

    /// Records a step, with the loss scale that it used.
    pub(super) fn record(
        &self,
        step: u64,
        (report, loss_scale): (&StepReport, Option<LossScale>),
        elapsed: Duration,
        waiting: Option<Waiting>,
    ) {
        let config = &self.job.config;
        let tokens = (config.train.global_batch_size * config.data.seq_len) as u64;
        let tokens_per_s = tokens as f64 / elapsed.as_secs_f64();
        let utilization = config
            .run
            .peak_tflops
            .zip(self.options.flops)
            .map(|(peak, flops)| flops.utilization(tokens_per_s, self.job.plan.mesh.world(), peak));
        let described = self.job.architecture.description();
        let counted = Counted::of(described, &self.job.plan.spec);
        let (parts, experts) = metrics::parts(report, counted, config.train.loss_terms(described));
        let metrics = StepMetrics {
            step: step + 1,
            loss: report.loss,
            grad_norm: report.grad_norm,
            lr: self.job.schedule.lr(step),
            tokens,
            targets: report.targets,
            tokens_per_s,
            step_ms: elapsed.as_secs_f64() * 1e3,
            scaling: loss_scale
                .map(|LossScale { scale, .. }| Scaling { loss_scale: scale, skipped: !report.finite }),
            utilization,
            waiting,
            parts,
            experts,
        };
        let mut log = self.log();
        log.write(|recorder| recorder.step(&metrics));
        if self.assembly.is_leader() {
            events::step(&metrics);
            if let Some(waiting) = &metrics.waiting {
                log.slow.note(waiting, metrics.step_ms);
            }
            self.options.reporter.step(&metrics);
        }
        log.losses.push(metrics.step_loss());
        log.records.push(metrics);
    }

    /// Records the evaluation after `step` steps, on all sets.
    pub(super) fn record_evaluation(&self, step: u64, evaluations: Vec<Evaluation>) {
        let mut log = self.log();
        for evaluation in &evaluations {
            log.write(|recorder| recorder.evaluation(&EvalMetrics::of(step, evaluation)));
            if self.assembly.is_leader() {
                events::evaluation(step, evaluation);
                self.options.reporter.evaluation(step, evaluation);
            }
        }
        if evaluations.iter().all(|evaluation| log.losses.is_sound(step, evaluation.loss)) {
            log.proven = step;
        }
        log.evaluations = evaluations;
    }

    /// Whether a run that resumes from `step` was interrupted before the evaluation after it was recorded. In the
    /// process of the first rank.
    pub(super) fn lacks_evaluation(&self, step: u64) -> bool {
        let sets = self.job.data.eval_sets().map(|(name, _)| name);
        self.log().metrics.as_ref().is_some_and(|recorder| recorder.lacks_evaluation(step, sets))
    }

    /// Records the result of a save.
    pub(super) fn note_save(&self, outcome: Outcome) {
        events::checkpoint(&outcome);
        let mut log = self.log();
        match outcome {
            Ok(saved) => {
                self.options.reporter.saved(&saved);
                log.saved = Some(saved);
                log.publish_metrics();
            }
            Err(error) => {
                log.not_saved = Some(error.to_string());
                log.note_trouble(error);
            }
        }
    }

    /// Gives the receipt of a rank's export to the first rank; returns false if that or the export failed.
    pub(super) fn note_export(&self, rank: Rank, exported: Result<Option<Receipt>, TrainError>) -> bool {
        let sent = exported
            .and_then(|receipt| Ok(self.assembly.give(RECEIPTS, rank, wire_result::encode(Ok(&receipt)))?));
        self.log().note_exported(sent)
    }

    /// Gives the exported model its final name, after all ranks have exported their rows; returns false if that failed.
    pub(super) fn commit_export(&self) -> bool {
        let export = self.log().export.take().expect("an export is committed once");
        let limit = Duration::from_secs_f64(self.job.config.run.timeout_s);
        let commit = || -> Result<(), TrainError> {
            let receipts = self.assembly.collect(RECEIPTS, self.job.plan.mesh.world(), limit)?;
            let receipts = receipts.iter().map(|receipt| wire_result::decode::<Option<Receipt>>(receipt));
            export.commit(receipts.collect::<Result<Vec<_>, _>>()?.into_iter().flatten())?;
            self.complete_export()
        };
        let committed = commit();
        self.log().note_exported(committed)
    }

    /// The checkpoint of the state after `done` steps, if the process of the first rank knows one.
    pub(super) fn checkpoint_of(&self, done: u64) -> Option<PathBuf> {
        let saved =
            self.log().saved.as_ref().filter(|saved| saved.step == done).map(|saved| saved.path.clone());
        let source = || match &self.start.source {
            Some(Source::Native(source)) if self.start.step == done => Some(source.dir().to_owned()),
            _ => None,
        };
        saved.or_else(source)
    }

    /// Exports the model to an object store, from the checkpoint of its state; returns false if that failed. Called by
    /// the first rank, since several ranks cannot write one object.
    pub(super) fn export_object(&self, done: u64) -> bool {
        let model = self.out_dir().join(MODEL);
        // If there is none, the reason has been recorded.
        let Some(checkpoint) = self.checkpoint_of(done) else { return false };
        let config = self.options.config_json.as_deref();
        let exported = export_checkpoint(&checkpoint, &model.join(MODEL_FILE), self.job, config);
        let complete = exported.and_then(|()| self.complete_export());
        self.log().note_exported(complete)
    }

    /// Writes the files that accompany the weights.
    fn complete_export(&self) -> Result<(), TrainError> {
        let (config, model) = (&self.job.config, self.out_dir().join(MODEL));
        if let Some(settings) = &config.adapter {
            let adapter = self.out_dir().join(ADAPTER);
            let exported = adapter.join(peft::exported_file(settings));
            let weights = adapter.join(peft::ADAPTER_FILE);
            let is_stacked = exported != weights;
            if is_stacked {
                let config_json = self.options.config_json.as_deref();
                export_stacked(self.job, &exported, &weights, config_json)?;
            }
            self.companions.write(&adapter)?;
            let text = peft::config_json(config, self.job.architecture.description());
            write_small(&adapter.join(peft::CONFIG_FILE), &text)?;
            events::exported(&adapter);
            if merges(config) {
                std::fs::create_dir_all(&model).map_err(TrainError::io("create", &model))?;
                export_merged(self.job, &exported, &model.join(MODEL_FILE))?;
            }
            if is_stacked {
                std::fs::remove_file(&exported).map_err(TrainError::io("remove", &exported))?;
            }
            if !merges(config) {
                return Ok(());
            }
        }
        self.companions.write(&model)?;
        let text = self.options.config_json.as_deref();
        text.map_or(Ok(()), |text| write_small(&model.join("config.json"), text))?;
        events::exported(&model);
        Ok(())
    }

    /// Announces to the other ranks whether the model is exported, and returns it.
    pub(super) fn announce_exported(&self, is_exported: bool) -> Result<bool, TrainError> {
        let announced = self.assembly.announce(EXPORTED, wire_result::encode(Ok(&is_exported)));
        Ok(announced.map(|()| is_exported)?)
    }

    /// Waits for [`Run::announce_exported`].
    pub(super) fn hear_exported(&self) -> Result<bool, TrainError> {
        wire_result::decode(&self.assembly.hear(EXPORTED, EXPORT_TIMEOUT)?)
    }

    /// Records that there is no thread to export the model; returns false, since that failed.
    pub(super) fn note_no_thread(&self, source: io::Error) -> bool {
        self.log().note_exported(Err(TrainError::no_thread("exports it", &source)))
    }

    /// Reports that a rank has ended, with any failure outside the computation in its process.
    pub(super) fn report_end(&self, rank: Rank) -> Result<(), TrainError> {
        let log = self.log();
        let trouble = log.trouble.as_ref().filter(|_| rank.0 == self.assembly.local().start);
        let ended = wire_result::encode(trouble.map_or(Ok(&()), Err));
        Ok(self.assembly.give(ENDS, rank, ended)?)
    }

    /// Waits for all ranks to end and returns a failure outside the computation, if there is one in any process. In the
    /// process of the first rank.
    pub(super) fn collect_trouble(&self) -> Option<TrainError> {
        if let Some(trouble) = self.log().trouble.take() {
            return Some(trouble);
        }
        let limit = Duration::from_secs_f64(self.job.config.run.timeout_s);
        let ends = match self.assembly.collect(ENDS, self.job.plan.mesh.world(), limit) {
            Ok(ends) => ends,
            Err(error) => return Some(error.into()),
        };
        let failed = |(rank, end): (usize, &Vec<u8>)| {
            let source = Box::new(wire_result::decode::<()>(end).err()?);
            Some(TrainError::RankFailed { rank: Rank(rank), source })
        };
        ends.iter().enumerate().find_map(failed)
    }

    /// Removes unfinished files and space reserved for saves, after all ranks of this process have ended. If the run
    /// failed on a file system without locks, lost processes may have started again and own these files; they are then
    /// left to the next start.
    pub(super) fn clear(&self, has_succeeded: bool) -> Result<(), fsdp_ckpt::Error> {
        match self.start.lock() {
            Some(lock) if has_succeeded || lock.is_exclusive() => lock.remove_leftovers(),
            _ => {
                self.log().export.take().into_iter().for_each(Export::leave);
                Ok(())
            }
        }
    }

    fn out_dir(&self) -> &'a Path {
        Path::new(&self.job.config.run.out_dir)
    }
}

impl Log {
    fn new(losses: Losses, export: Option<Export>) -> Self {
        Self {
            metrics: None,
            records: Vec::new(),
            slow: SlowRank::default(),
            evaluations: Vec::new(),
            losses,
            proven: 0,
            saved: None,
            not_saved: None,
            trouble: None,
            export,
        }
    }

    /// Returns the last step whose weights are known to give a sound loss, after the loss of the weights of `step` has
    /// been recorded.
    pub(super) fn prove(&mut self, step: u64) -> u64 {
        if self.losses.judge(step).is_some_and(|judged| judged.is_ok()) {
            self.proven = self.proven.max(step);
        }
        self.proven
    }

    /// Writes metrics, if they can be written. After a failure the rest of the run is not recorded: it is about to
    /// stop.
    fn write(&mut self, write: impl FnOnce(&mut Recorder) -> Result<(), TrainError>) {
        if let Some(Err(error)) = self.metrics.as_mut().map(write) {
            self.metrics = None;
            self.note_trouble(error);
        }
    }

    /// Publishes metrics at the location that users see.
    pub(super) fn publish_metrics(&mut self) {
        if let Some(Err(error)) = self.metrics.as_ref().map(Recorder::publish) {
            self.metrics = None;
            self.note_trouble(error);
        }
    }

    /// Requests all ranks to stop, for this reason.
    pub(super) fn note_trouble(&mut self, error: TrainError) {
        self.trouble.get_or_insert(error);
    }

    fn note_exported(&mut self, exported: Result<(), TrainError>) -> bool {
        let failed = |error| self.note_trouble(TrainError::NotExported { source: Box::new(error) });
        exported.map_err(failed).is_ok()
    }
}
