//! One rank of a run: the engine, fed with data.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_ckpt::native::NativeReader;
use fsdp_comm::launch::Seat;
use fsdp_core::comm::{Comms, Traffic};
use fsdp_core::engine::{Engine, IssueOrder, Observer, StepInput, StepReport};
use fsdp_core::memory::Usage;
use fsdp_core::schedule::micro_batch_index;
use fsdp_core::{ExactSum, Rank};
use fsdp_nn::Backend;
use fsdp_nn::model::{Architecture, Batch, ModelProgram};

use crate::checkpoint::{Foreign, RunState, SavedModel, restore};
use crate::error::TrainError;
use crate::job::{Job, cuts};
use crate::loss_scale::{LossScale, LossScaler};
use crate::metrics::Evaluation;
use crate::not_finite::first_not_finite;
use crate::router_bias::Changes;
use crate::rule::{self, LateParams};

/// One rank of a training run.
pub struct RankTrainer<'a, M: Backend, A: Architecture + Clone> {
    job: &'a Job<A>,
    engine: Engine<M, ModelProgram<M, A>>,
    /// Steps that were issued and whose reports have not been read.
    unread: VecDeque<u64>,
    /// `None` if the run has no loss scale.
    scaler: Option<LossScaler>,
}

impl<'a, M: Backend, A: Architecture + Clone> RankTrainer<'a, M, A> {
    /// Connects the rank, allocates everything and initializes this rank's rows of the parameters: computed, read, or
    /// received from the first replica.
    ///
    /// # Errors
    /// Errors of the parts involved.
    pub fn new(job: &'a Job<A>, seat: Seat<M>) -> Result<Self, TrainError> {
        let mut engine = Self::connect(job, seat, &LateParams::new())?;
        engine
            .load_params(job.init.origin(), |piece, values| job.init.fill(&job.plan.spec, piece, values))?;
        Ok(Self::of(job, engine))
    }

    /// Connects the rank, allocates everything and loads this rank's rows of parameters and optimizer state from a
    /// checkpoint, which may be of another world. The first replica reads it; the others receive what it reads.
    ///
    /// # Errors
    /// Errors of the parts involved; [`TrainError::Checkpoint`].
    pub fn resume(job: &'a Job<A>, seat: Seat<M>, checkpoint: &NativeReader) -> Result<Self, TrainError> {
        let run = RunState::read(checkpoint)?;
        let mut engine = Self::connect(job, seat, &run.late)?;
        restore(&mut engine, checkpoint, &job.init)?;
        let mut trainer = Self::of(job, engine);
        if let Some(scaler) = &mut trainer.scaler {
            run.loss_scale.into_iter().for_each(|saved| scaler.resume(saved));
        }
        Ok(trainer)
    }

    /// Connects the rank, allocates everything and loads this rank's rows from the checkpoint of another trainer,
    /// in which some parameters began late.
    ///
    /// # Errors
    /// As [`RankTrainer::resume`].
    pub(crate) fn resume_foreign(
        job: &'a Job<A>,
        seat: Seat<M>,
        (checkpoint, late): (&Foreign, &LateParams),
        stop: &AtomicBool,
    ) -> Result<Self, TrainError> {
        let mut engine = Self::connect(job, seat, late)?;
        checkpoint.restore(&mut engine, &job.init, stop)?;
        Ok(Self::of(job, engine))
    }

    /// Connects the rank, allocates what an evaluation needs, and loads this rank's rows of the parameters from a
    /// checkpoint if one is given, or else from the job's source.
    ///
    /// # Errors
    /// Errors of the parts involved; [`TrainError::Checkpoint`].
    pub(crate) fn to_evaluate(
        job: &'a Job<A>,
        seat: Seat<M>,
        saved: Option<&SavedModel>,
    ) -> Result<Self, TrainError> {
        let mut engine = Self::connect(job, seat, &LateParams::new())?;
        // The plan trains nothing; only the description knows which parameters belong to adapters.
        let spec = &job.architecture.description().spec;
        match saved {
            Some(saved) => saved.load(&mut engine, spec, &job.init)?,
            None => {
                engine.load_params(job.init.origin(), |piece, values| job.init.fill(spec, piece, values))?
            }
        }
        Ok(Self::of(job, engine))
    }

    fn of(job: &'a Job<A>, engine: Engine<M, ModelProgram<M, A>>) -> Self {
        Self { job, engine, unread: VecDeque::new(), scaler: LossScaler::of(&job.config) }
    }

    fn connect(
        job: &'a Job<A>,
        seat: Seat<M>,
        late: &LateParams,
    ) -> Result<Engine<M, ModelProgram<M, A>>, TrainError> {
        let Seat { memory, gathers, reductions, .. } = seat;
        let plan = Arc::clone(&job.plan);
        let (head_chunks, predicted) = (memory.head_chunks(), job.config.run.device.head_chunks());
        assert_eq!(
            head_chunks, predicted,
            "memory is predicted for the device of the run file, and this is another"
        );
        let comms = Comms::connect(&*memory, gathers, reductions, plan.mesh, &plan.groups(), job.digest)?;
        let options = job.program_options(cuts(&job.config, &plan, comms.rank()));
        let program = ModelProgram::new(job.architecture.clone(), plan.spec.clone(), options);
        let rule = rule::delayed_rule(&job.config.train, &plan.spec, late)?;
        Ok(Engine::new(memory, plan, comms, program, Box::new(rule))?)
    }

    /// The rank that this trainer runs.
    pub fn rank(&self) -> Rank {
        self.engine.rank()
    }

    /// The engine, for reading shards.
    pub fn engine(&self) -> &Engine<M, ModelProgram<M, A>> {
        &self.engine
    }

    /// The loss scale after the steps whose reports were read; `None` if the run has none.
    pub fn loss_scale(&self) -> Option<LossScale> {
        self.scaler.as_ref().map(LossScaler::current)
    }

    /// The communication of this rank so far.
    pub fn traffic(&self) -> Traffic {
        self.engine.traffic()
    }

    /// The memory usage of this rank so far.
    pub fn usage(&self) -> Usage {
        self.engine.memory().usage()
    }

    /// Runs step `step` (from 0).
    ///
    /// # Errors
    /// [`TrainError::NotFinite`], [`TrainError::StateNotFinite`] of the previous step, or any other failure.
    ///
    /// # Panics
    /// If the report of an earlier step has not been read.
    pub fn step(
        &mut self,
        step: u64,
        stop: bool,
        order: &mut dyn IssueOrder,
        observer: &mut dyn Observer,
    ) -> Result<StepReport, TrainError> {
        self.issue(step, stop, order, observer)?;
        let (read, report) = self.report()?.expect("a step was just issued");
        assert_eq!(read, step, "reports are read in the order of steps");
        Ok(report)
    }

    /// Issues step `step` (from 0). On a device with its own queues the step may still be running on return. At most
    /// two steps may be unread, but only one if the next one [depends on its report](Self::needs_reports).
    ///
    /// # Errors
    /// Any failure.
    ///
    /// # Panics
    /// If more steps are unread.
    pub fn issue(
        &mut self,
        step: u64,
        stop: bool,
        order: &mut dyn IssueOrder,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let plan = Arc::clone(&self.job.plan);
        let batches = (0..plan.step.rounds)
            .map(|round| {
                let accumulation = plan.policy.accumulation;
                let index = micro_batch_index(plan.mesh, accumulation, plan.step.rounds, self.rank(), round);
                self.job.data.train_batch(step, index)
            })
            .collect();
        self.set_batches(step, batches)?;
        let loss_scale = self.loss_scale().map(|current| current.scale);
        self.engine.program_mut().set_loss_scale(loss_scale.unwrap_or(1.0));
        let input = StepInput {
            step: self.scaler.as_ref().map_or(step + 1, |scaler| scaler.update_number(step)),
            lr: self.job.schedule.lr(step),
            grad_clip: self.job.config.train.grad_clip,
            loss_scale,
            stop,
        };
        self.engine.step(input, order, observer)?;
        self.unread.push_back(step);
        Ok(())
    }

    /// Whether the next step depends on the reports of all earlier ones, so that only one may be unread: with a loss scale,
    /// or with corrections of routers.
    pub fn needs_reports(&self) -> bool {
        self.scaler.is_some() || self.job.config.train.router_bias_update_speed > 0.0
    }

    /// Number of steps that were issued and whose reports have not been read.
    pub fn unread(&self) -> usize {
        self.unread.len()
    }

    /// Waits for the report of the oldest unread step, and returns it with the step's number (from 0); `None` if no
    /// step is unread. If the report is not finite, the step was skipped because its gradients overflowed with the loss
    /// scale.
    ///
    /// # Errors
    /// [`TrainError::NotFinite`], [`TrainError::LossScale`] and [`TrainError::StateNotFinite`]; those of the memory and
    /// of communication.
    pub fn report(&mut self) -> Result<Option<(u64, StepReport)>, TrainError> {
        let Some(step) = self.unread.pop_front() else { return Ok(None) };
        let report = self.engine.report()?.expect("the engine has a report for every step that was issued");
        let StepReport { loss, grad_norm, finite, state_finite, .. } = report;
        if !state_finite {
            // Counted from 1, this is the previous step, which wrote the value: a value from an earlier step would have
            // failed an earlier report.
            return self.fail_non_finite(step);
        }
        let may_continue = self.scaler.as_mut().is_some_and(|scaler| scaler.note(finite));
        if finite || may_continue {
            if let Some(changes) = Changes::after(self.job, &report) {
                self.engine.change_params(
                    |param| changes.has(param),
                    |piece, values| changes.add(piece.param, piece.param_offset, values),
                )?;
            }
            return Ok(Some((step, report)));
        }
        let step = step + 1;
        Err(match self.loss_scale() {
            Some(LossScale { scale, skipped, .. }) if scale < 1.0 => {
                TrainError::LossScale { step, loss, grad_norm, skipped }
            }
            _ => TrainError::NotFinite { step, loss, grad_norm },
        })
    }

    /// Asks all ranks whether the parameters and optimizer state written by the first `step` steps are finite. All
    /// ranks call it, after they have read the reports of these steps. If it fails, the state must not be saved or
    /// exported.
    ///
    /// # Errors
    /// [`TrainError::StateNotFinite`] on a rank that has such a value; an error of communication on all others.
    pub(crate) fn check_state(&mut self, step: u64) -> Result<(), TrainError> {
        if self.engine.state_is_finite()? { Ok(()) } else { self.fail_non_finite(step) }
    }

    /// Fails with the first non-finite value of this rank. A rank that has none waits for one that fails, so that the
    /// error that ends the run names the location.
    fn fail_non_finite<T>(&mut self, step: u64) -> Result<T, TrainError> {
        if let Some(found) = first_not_finite(&self.engine, step)? {
            return Err(found);
        }
        self.meet()?;
        panic!("an update has noted a value that is not finite, and no rank finds it");
    }

    /// Evaluates all batches of all evaluation sets, in order, after `step` steps. If `stop` is raised on some rank, it
    /// ends after the current batch and returns `None`.
    ///
    /// # Errors
    /// [`TrainError::EvaluationNotFinite`], [`TrainError::StateNotFinite`], or any other failure.
    pub fn evaluate(
        &mut self,
        step: u64,
        stop: &AtomicBool,
        order: &mut dyn IssueOrder,
        observer: &mut dyn Observer,
    ) -> Result<Option<Vec<Evaluation>>, TrainError> {
        let sets = 0..self.job.data.eval_sets().len();
        sets.map(|set| self.evaluate_set(set, step, stop, order, observer)).collect()
    }

    /// Like [`RankTrainer::evaluate`], on one set.
    fn evaluate_set(
        &mut self,
        set: usize,
        step: u64,
        stop: &AtomicBool,
        order: &mut dyn IssueOrder,
        observer: &mut dyn Observer,
    ) -> Result<Option<Evaluation>, TrainError> {
        let (name, batches) = self.job.data.eval_sets().nth(set).expect("the set is there");
        let plan = &self.job.plan;
        let (rounds, dp_rank) = (plan.step.rounds, plan.mesh.dp_rank(self.rank()));
        let (mut sum, mut targets) = (ExactSum::default(), 0);
        for batch in 0..batches {
            let micro_batch = |round| self.job.data.eval_batch(set, batch, dp_rank * rounds + round);
            let data = (0..rounds).map(micro_batch).collect();
            self.set_batches(0, data)?;
            let report = self.engine.evaluate(stop.load(Ordering::Relaxed), order, observer)?;
            if !report.state_finite {
                return self.fail_non_finite(step);
            }
            sum.add(report.loss * report.targets as f64);
            targets += report.targets;
            if report.stop {
                return Ok(None);
            }
        }
        let (set, loss) = (name.to_owned(), sum.value() / targets.max(1) as f64);
        if loss.is_finite() {
            Ok(Some(Evaluation { set, loss, targets }))
        } else {
            Err(TrainError::EvaluationNotFinite { set, step, loss })
        }
    }

    /// Returns whether `value` is true on any rank; every rank calls it.
    ///
    /// # Errors
    /// Errors of communication.
    pub(crate) fn any(&mut self, value: bool) -> Result<bool, TrainError> {
        Ok(self.engine.any(value)?)
    }

    /// Waits until every rank has called it.
    ///
    /// # Errors
    /// Errors of communication.
    pub(crate) fn meet(&mut self) -> Result<(), TrainError> {
        Ok(self.engine.meet()?)
    }

    fn set_batches(&mut self, step: u64, batches: Vec<Batch>) -> Result<(), TrainError> {
        let memory = Arc::clone(self.engine.memory());
        self.engine.program_mut().set_batches(&*memory, step, batches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
