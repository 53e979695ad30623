//! The run of one rank: its steps, with metrics, saves and evaluations between them; at the end, first the state is
//! saved and then the model exported.

use std::panic::resume_unwind;
use std::sync::atomic::Ordering;
use std::time::Instant;

use fsdp_ckpt::is_url;
use fsdp_comm::launch::Seat;
use fsdp_config::{Device, WatchedLoss};
use fsdp_core::engine::{Observer, ProgramOrder};
use fsdp_nn::Backend;
use fsdp_nn::model::Architecture;

use super::run::{RankResult, Run};
use super::step_clock::StepClock;
use super::warning::RunWarning;
use crate::adapter::assembles;
use crate::checkpoint::{Cleanup, CleanupResult, Destination, Outcome, RunState, Saver, Source, Writer};
use crate::error::TrainError;
use crate::events;
use crate::export::export_model;
use crate::metrics::Evaluation;
use crate::rank::RankTrainer;
use crate::waiting::{self, WaitReports, WaitTimer};

/// The run of one rank.
struct RankRun<'a, 'r, M: Backend, A: Architecture + Clone> {
    run: &'r Run<'a, A>,
    trainer: RankTrainer<'a, M, A>,
    saver: Option<Saver>,
    /// Work after a save, on the first rank.
    cleanup: Option<Cleanup>,
    /// A checkpoint whose weights have not produced a loss yet. Older ones are kept until they have.
    unproven: Option<u64>,
    /// The losses that decide whether the run is over and which states are the best.
    watched: Vec<WatchedLoss>,
    observer: Box<dyn Observer>,
    /// Waiting times of other ranks, on the first rank.
    reports: WaitReports,
    clock: StepClock,
}

/// Runs one rank. A failure is announced to all ranks.
pub(super) fn run_rank<M: Backend, A: Architecture + Clone>(
    run: &Run<'_, A>,
    seat: Seat<M>,
) -> Result<RankResult, TrainError> {
    let rank = seat.rank;
    let ended = RankRun::begin(run, seat).and_then(RankRun::run);
    ended.inspect_err(|error| run.assembly.fail(rank, error.kind(), error.to_string()))
}

impl<'a, 'r, M: Backend, A: Architecture + Clone> RankRun<'a, 'r, M, A> {
    /// Makes a rank ready for its first step, and takes over the output folder.
    fn begin(run: &'r Run<'a, A>, seat: Seat<M>) -> Result<Self, TrainError> {
        let observer = (run.options.observer)(seat.rank);
        let mut trainer = match &run.start.source {
            Some(Source::Native(checkpoint)) => RankTrainer::resume(run.job, seat, checkpoint)?,
            Some(Source::Foreign(checkpoint)) => {
                let checkpoint = (&**checkpoint, &run.start.late);
                RankTrainer::resume_foreign(run.job, seat, checkpoint, run.options.stop)?
            }
            None => RankTrainer::new(run.job, seat)?,
        };
        let mut saver = Saver::of_rank(run.saves, run.job.plan.mesh, trainer.rank());
        if let (Some(saver), true) = (&mut saver, run.job.config.checkpoint.every > 0) {
            saver.claim(trainer.engine())?;
        }
        // When all ranks have answered, all inputs are known to be valid; only then is an earlier run replaced.
        if trainer.any(run.options.stop.load(Ordering::Relaxed))? {
            return Err(TrainError::Stopped);
        }
        if trainer.rank().0 == 0 {
            run.take_over()?;
        }
        let (reports, clock) = (WaitReports::new(run.start.step), StepClock::default());
        let watched = run.start.watched.clone();
        Ok(Self { run, trainer, saver, cleanup: None, unproven: None, watched, observer, reports, clock })
    }

    /// Runs all steps, then saves and exports.
    fn run(mut self) -> Result<RankResult, TrainError> {
        let done = self.steps()?;
        self.end_save()?;
        self.finish_cleanup();
        let has_trouble = self.run.log().trouble.is_some();
        if self.trainer.any(has_trouble)? {
            self.ensure_saved(done)?;
        }
        self.trainer.check_state(done)?;
        if !self.export(done)? {
            self.ensure_saved(done)?;
        }
        self.run.report_end(self.trainer.rank())?;
        let (usage, traffic, is_over) = (self.trainer.usage(), self.trainer.traffic(), self.is_over());
        Ok(RankResult { usage, traffic, done, watched: self.watched, is_over })
    }

    /// Runs all steps, with evaluations and saves between them; returns the number of steps done.
    fn steps(&mut self) -> Result<u64, TrainError> {
        let (job, start) = (self.run.job, self.run.start);
        let (steps, every) = (job.config.train.steps, job.config.data.eval_every);
        let evaluates_after = |done: u64| done == steps || (every > 0 && done.is_multiple_of(every));
        let evaluates = evaluates_after(start.step);
        let is_missing = start.step == steps || evaluates && self.lacks_evaluation()?;
        // The checkpoint of a step is saved before the evaluation, so its losses may be missing.
        if is_missing || evaluates && self.lacks_watched_loss(start.step) {
            let stop = self.evaluate(start.step, is_missing)?;
            if stop {
                return Ok(start.step);
            }
        }
        if self.is_over() {
            return Ok(start.step);
        }
        for step in start.step..steps {
            let done = step + 1;
            let is_due = job.config.checkpoint.is_due(done, steps);
            let evaluates = evaluates_after(done);
            let is_async_device = self.trainer.engine().memory().is_asynchronous();
            let needs_report = self.trainer.needs_reports();
            let begin = Instant::now();
            let mut timer = WaitTimer::new(&mut *self.observer);
            self.trainer.issue(step, self.run.should_stop(), &mut ProgramOrder, &mut timer)?;
            self.clock.issued(begin, Instant::now());
            let waited = timer.waited();
            // Compiled programs and asynchronous devices wait by themselves, and not the host.
            let host_waits = !is_async_device && job.config.run.device != Device::Xla;
            if host_waits && job.plan.mesh.world() > 1 {
                waiting::report(self.run.assembly, step, self.trainer.rank(), waited)?;
            }
            // The host runs one step ahead of an asynchronous device, but not past anything that reads the state, nor
            // if the next step depends on this report.
            let mut stop =
                self.read_until(usize::from(is_async_device && !needs_report && !is_due && !evaluates))?;
            if stop {
                self.read_until(0)?;
            }
            let is_saved = stop || is_due;
            if is_saved {
                self.save(done)?;
            }
            let outcome = self.saver.as_mut().and_then(Saver::poll);
            self.note_outcome(outcome);
            stop |= evaluates && self.evaluate(done, true)?;
            let is_over = evaluates && self.is_over();
            let is_best = evaluates && self.run.saves.best(&self.watched).contains(&done);
            // A run that is over needs no state to resume from, unless checkpoints are kept.
            if !is_saved && (stop || is_best || is_over && job.config.checkpoint.every > 0) {
                self.save(done)?;
            }
            if stop || is_over {
                return Ok(done);
            }
        }
        Ok(steps)
    }

    /// Reads step reports until no more than `unread` are left; returns whether some rank requested a stop.
    fn read_until(&mut self, unread: usize) -> Result<bool, TrainError> {
        let mut stop = false;
        while self.trainer.unread() > unread {
            let loss_scale = self.trainer.loss_scale();
            let (step, report) = self.trainer.report()?.expect("a step is unread");
            let elapsed = self.clock.read(Instant::now());
            if self.is_first_local() {
                let reports = if self.is_first() { Some(&mut self.reports) } else { None };
                let waiting = reports.and_then(|reports| reports.newest_before(step, self.run.assembly));
                self.run.record(step, (&report, loss_scale), elapsed, waiting);
            }
            if self.is_first() && report.finite {
                self.begin_cleanup(step);
            }
            stop |= report.stop;
        }
        Ok(stop)
    }

    /// Saves the state after `step` steps, blocking or in the background.
    fn save(&mut self, step: u64) -> Result<(), TrainError> {
        self.finish_cleanup();
        // A rank that answers has begun the previous save.
        self.trainer.check_state(step)?;
        self.note_save();
        self.begin_save(step, Destination::OutDir, Writer::Thread)?;
        if self.run.job.config.checkpoint.is_async { Ok(()) } else { self.end_save() }
    }

    fn begin_save(&mut self, step: u64, place: Destination, writer: Writer) -> Result<(), TrainError> {
        if self.is_first() {
            events::checkpoint_begins(step);
        }
        let Some(saver) = &mut self.saver else { return Ok(()) };
        let model = self.run.options.config_json.as_deref();
        let mut state = RunState::of(self.run.job, step, model, (&self.run.start.changes, &self.watched));
        state.loss_scale = self.trainer.loss_scale();
        state.late.clone_from(&self.run.start.late);
        saver.save(self.trainer.engine(), state, place, writer)
    }

    /// Waits for the save in progress, if any.
    fn end_save(&mut self) -> Result<(), TrainError> {
        self.trainer.meet()?;
        self.note_save();
        Ok(())
    }

    /// Waits for the save in progress, if any. All ranks must have begun it.
    fn note_save(&mut self) {
        let outcome = self.saver.as_mut().and_then(Saver::finish);
        self.note_outcome(outcome);
    }

    /// Records the result of a save; `Some` only on the first rank.
    fn note_outcome(&mut self, outcome: Option<Outcome>) {
        if let Some(outcome) = outcome {
            self.unproven = outcome.as_ref().ok().map(|saved| saved.step).or(self.unproven);
            self.run.note_save(outcome);
        }
    }

    /// Called after the finite report of `step` (from 0), which proves a checkpoint that its weights came from, if its
    /// loss is sound: old ones may now be deleted, and space be reserved for the next.
    fn begin_cleanup(&mut self, step: u64) {
        if self.unproven.take_if(|saved| *saved <= step).is_none() {
            if step == self.run.start.step {
                // The state that the run began with may not have been judged before, and must not be deleted if it is sound.
                self.run.log().prove(step);
            }
            return;
        }
        self.finish_cleanup();
        let proven = self.run.log().prove(step);
        let is_writing = self.saver.as_ref().is_some_and(Saver::is_writing);
        let best = self.run.saves.best(&self.watched);
        match Cleanup::begin(self.run.saves, proven, best, !is_writing) {
            Ok(cleanup) => self.cleanup = Some(cleanup),
            Err(error) => self.run.log().note_trouble(error),
        }
    }

    /// Waits for the work that [`RankRun::begin_cleanup`] started.
    fn finish_cleanup(&mut self) {
        let Some(CleanupResult { pruned, reserved }) = self.cleanup.take().map(Cleanup::finish) else {
            return;
        };
        if let Err(error) = pruned {
            self.run.log().note_trouble(error);
        }
        if let Err(error) = reserved {
            self.run.options.reporter.warn(&RunWarning::NotReserved { fault: error.to_string() });
        }
    }

    /// Ensures that there is a checkpoint of the last step, wherever there is room for it. Starts no thread: the system
    /// may have no more of them, and a rank without one could not tell the others where it saves.
    fn ensure_saved(&mut self, step: u64) -> Result<(), TrainError> {
        for place in [Destination::OutDir, Destination::Elsewhere] {
            let is_saved = self.run.log().saved.as_ref().is_some_and(|saved| saved.step == step);
            if self.trainer.any(self.is_first() && is_saved)? {
                return Ok(());
            }
            if self.is_first() {
                // If this fails, so will the save, which reports the reason.
                let _ = self.run.saves.discard(step);
                self.run.saves.open(place);
            }
            // A barrier: what is announced is there for all.
            self.trainer.check_state(step)?;
            self.begin_save(step, place, Writer::Rank)?;
            self.end_save()?;
        }
        Ok(())
    }

    /// Exports the model; returns false, on all ranks, if that failed.
    fn export(&mut self, done: u64) -> Result<bool, TrainError> {
        if is_url(&self.run.job.config.run.out_dir) {
            return self.export_object(done);
        }
        let exported = export_model(self.trainer.engine(), &self.run.plan, &self.run.job.config);
        let mut is_exported = self.run.note_export(self.trainer.rank(), exported);
        if self.trainer.any(!is_exported)? {
            return Ok(false);
        }
        if assembles(&self.run.job.config) {
            return self.export_apart(Run::commit_export);
        }
        if self.is_first() {
            is_exported = self.run.commit_export();
        }
        Ok(!self.trainer.any(!is_exported)?)
    }

    /// Like [`RankRun::export`], to an object store.
    fn export_object(&mut self, done: u64) -> Result<bool, TrainError> {
        let is_saved = self.is_first() && self.run.checkpoint_of(done).is_some();
        if !self.trainer.any(is_saved)? {
            self.begin_save(done, Destination::OutDir, Writer::Rank)?;
            self.end_save()?;
        }
        self.export_apart(move |run| run.export_object(done))
    }

    /// Exports in a thread of the first rank, if that may take longer than the time limit of a collective: stacking
    /// adapters of experts, merging adapters into their base, or copying to an object store. The ranks wait without a collective, but keep their
    /// cores (see [`Engine::meet`]). The thread needs none: it is there before they wait, and ends their wait itself.
    ///
    /// [`Engine::meet`]: fsdp_core::engine::Engine::meet
    fn export_apart(&mut self, export: impl FnOnce(&Run<'a, A>) -> bool + Send) -> Result<bool, TrainError> {
        let run = self.run;
        if !self.is_first() {
            self.trainer.meet()?;
            return run.hear_exported();
        }
        std::thread::scope(|scope| {
            let named = std::thread::Builder::new().name("export".to_owned());
            let thread = named.spawn_scoped(scope, || run.announce_exported(export(run)));
            let thread = thread.map_err(|source| run.announce_exported(run.note_no_thread(source)));
            self.trainer.meet()?;
            match thread {
                Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
                Err(announced) => announced,
            }
        })
    }

    /// Evaluates, and records the results if `records`; returns whether some rank requested a stop before the end.
    fn evaluate(&mut self, step: u64, records: bool) -> Result<bool, TrainError> {
        if self.is_first() {
            events::evaluation_begins(step);
        }
        let evaluations =
            self.trainer.evaluate(step, self.run.options.stop, &mut ProgramOrder, &mut *self.observer)?;
        let Some(evaluations) = evaluations else { return Ok(true) };
        if self.run.job.config.watches_loss() {
            let early_stop = self.run.job.config.train.early_stop.as_ref();
            let set = early_stop.and_then(|early_stop| early_stop.set.as_ref());
            let is_watched = |found: &&Evaluation| set.is_none_or(|set| *set == found.set);
            let found = evaluations.iter().find(is_watched);
            self.watched.extend(found.map(|found| WatchedLoss { step, loss: found.loss }));
        }
        if records && self.is_first_local() && !evaluations.is_empty() {
            self.run.record_evaluation(step, evaluations);
        }
        Ok(false)
    }

    /// Whether the metrics lack the evaluation after the step from which the run resumes.
    fn lacks_evaluation(&mut self) -> Result<bool, TrainError> {
        let step = self.run.start.step;
        let is_missing = step > 0 && self.is_first() && self.run.lacks_evaluation(step);
        self.trainer.any(is_missing)
    }

    /// Whether early stopping ends the run: equal on all ranks.
    fn is_over(&self) -> bool {
        self.run
            .job
            .config
            .train
            .early_stop
            .as_ref()
            .is_some_and(|early_stop| early_stop.is_over(&self.watched))
    }

    /// Whether the loss after this step is to be watched and is missing.
    fn lacks_watched_loss(&self, step: u64) -> bool {
        let is_known = || self.watched.iter().any(|watched| watched.step == step);
        step > 0 && self.run.job.config.watches_loss() && !is_known()
    }

    /// Whether this is the first rank of the world.
    fn is_first(&self) -> bool {
        self.trainer.rank().0 == 0
    }

    /// Whether this is the first rank of this process.
    fn is_first_local(&self) -> bool {
        self.trainer.rank().0 == self.run.assembly.local().start
    }
}
