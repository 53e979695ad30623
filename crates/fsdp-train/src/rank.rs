//! One rank of a run: the engine, fed with data.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_ckpt::native::NativeReader;
use fsdp_comm::launch::Seat;
use fsdp_core::comm::Traffic;
use fsdp_core::engine::{Comms, Engine, IssueOrder, Observer, StepInput, StepReport};
use fsdp_core::memory::Usage;
use fsdp_core::schedule::micro_batch_index;
use fsdp_core::{ExactSum, Rank};
use fsdp_nn::model::{Architecture, Batch, ModelProgram};

use crate::checkpoint::{Foreign, RunState, SavedModel, restore};
use crate::error::TrainError;
use crate::job::Job;
use crate::loss_scale::{LossScale, LossScaler};
use crate::not_finite::first_not_finite;
use crate::rule::TrainBackend;

/// One rank of a training run.
pub struct RankTrainer<'a, M: TrainBackend, A: Architecture + Clone> {
    job: &'a Job<A>,
    engine: Engine<M, ModelProgram<M, A>>,
    /// Steps that were issued and whose reports were not read.
    unread: VecDeque<u64>,
    /// Where gradients are multiplied with a scale of the loss.
    scaler: Option<LossScaler>,
}

/// The result of an evaluation on one set.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// The name of the set.
    pub set: String,
    /// Mean loss over the counted targets of all batches.
    pub loss: f64,
    /// How many targets counted.
    pub targets: u64,
}

impl Evaluation {
    /// e to the mean loss per target. Where that is more than a double can hold, infinity.
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }
}

impl<'a, M: TrainBackend, A: Architecture + Clone> RankTrainer<'a, M, A> {
    /// Connects the rank, allocates everything and draws this rank's rows of the parameters, or reads them, or receives
    /// what the first replica reads.
    ///
    /// # Errors
    /// Those of the parts.
    pub fn new(job: &'a Job<A>, seat: Seat<M>) -> Result<Self, TrainError> {
        let mut engine = Self::connect(job, seat)?;
        engine
            .load_params(job.init.origin(), |piece, values| job.init.fill(&job.plan.spec, piece, values))?;
        Ok(Self::of(job, engine))
    }

    /// Connects the rank, allocates everything and takes this rank's rows of parameters and optimizer state
    /// from a checkpoint, whoever wrote it. The first replica reads it, and the others receive what it reads.
    ///
    /// # Errors
    /// Those of the parts, and [`TrainError::Checkpoint`].
    pub fn resume(job: &'a Job<A>, seat: Seat<M>, checkpoint: &NativeReader) -> Result<Self, TrainError> {
        let mut engine = Self::connect(job, seat)?;
        restore(&mut engine, checkpoint, &job.init)?;
        let mut trainer = Self::of(job, engine);
        if let Some(scaler) = &mut trainer.scaler {
            RunState::read(checkpoint)?.loss_scale.into_iter().for_each(|saved| scaler.resume(saved));
        }
        Ok(trainer)
    }

    /// Connects the rank, allocates everything and takes this rank's rows from what another trainer has saved.
    ///
    /// # Errors
    /// As [`RankTrainer::resume`].
    pub fn resume_foreign(
        job: &'a Job<A>,
        seat: Seat<M>,
        checkpoint: &Foreign,
        stop: &AtomicBool,
    ) -> Result<Self, TrainError> {
        let mut engine = Self::connect(job, seat)?;
        checkpoint.restore(&mut engine, stop)?;
        Ok(Self::of(job, engine))
    }

    /// Connects the rank, allocates what an evaluation needs, and takes this rank's rows of the parameters from a checkpoint,
    /// if one is given, or from where the job has them.
    ///
    /// # Errors
    /// Those of the parts, and [`TrainError::Checkpoint`].
    pub(crate) fn to_evaluate(
        job: &'a Job<A>,
        seat: Seat<M>,
        saved: Option<&SavedModel>,
    ) -> Result<Self, TrainError> {
        let mut engine = Self::connect(job, seat)?;
        // In the plan nothing is trained; what is an adapter's, the description knows.
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

    fn connect(job: &'a Job<A>, seat: Seat<M>) -> Result<Engine<M, ModelProgram<M, A>>, TrainError> {
        let Seat { memory, gathers, reductions, .. } = seat;
        let plan = Arc::clone(&job.plan);
        let (chunks, predicted) = (memory.head_chunks(), job.config.run.device.head_chunks());
        assert_eq!(
            chunks, predicted,
            "memory is predicted for the device of the run file, and this is another"
        );
        let comms =
            Comms::connect(&*memory, gathers, reductions, plan.mesh, plan.step.sub_group, job.digest)?;
        let options = job.program_options();
        let program = ModelProgram::new(job.architecture.clone(), plan.spec.clone(), options);
        let rule = M::rule(&job.config.train, &plan.spec)?;
        Ok(Engine::new(memory, plan, comms, program, rule)?)
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.engine.rank()
    }

    /// The engine, to read shards from.
    pub fn engine(&self) -> &Engine<M, ModelProgram<M, A>> {
        &self.engine
    }

    /// The scale of the loss after the steps whose reports were read, where there is one.
    pub fn loss_scale(&self) -> Option<LossScale> {
        self.scaler.as_ref().map(LossScaler::now)
    }

    /// What this rank communicated so far.
    pub fn traffic(&self) -> Traffic {
        self.engine.traffic()
    }

    /// What this rank's memory counted so far.
    pub fn usage(&self) -> Usage {
        self.engine.memory().usage()
    }

    /// Runs step `step` (from 0).
    ///
    /// # Errors
    /// [`TrainError::NotFinite`], [`TrainError::StateNotFinite`] of the step before, or whatever failed.
    ///
    /// # Panics
    /// When the report of a step that was issued before was not read.
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

    /// Issues step `step` (from 0): on a device with queues of its own it may still be under way on return. At
    /// most two steps may be unread; with a scale of the loss one, since it follows from all reports before.
    ///
    /// # Errors
    /// Whatever failed.
    ///
    /// # Panics
    /// When more are.
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
        let loss_scale = self.loss_scale().map(|now| now.scale);
        self.engine.program_mut().set_loss_scale(loss_scale.unwrap_or(1.0));
        let input = StepInput {
            step: self.scaler.as_ref().map_or(step + 1, |scaler| scaler.update(step)),
            lr: self.job.schedule.lr(step),
            grad_clip: self.job.config.train.grad_clip,
            loss_scale,
            stop,
        };
        self.engine.step(input, order, observer)?;
        self.unread.push_back(step);
        Ok(())
    }

    /// How many steps were issued and not read.
    pub fn unread(&self) -> usize {
        self.unread.len()
    }

    /// The oldest step (from 0) that was issued and not read, if there is one, with its report; waits until it is
    /// there. One that is not finite is of a step that was skipped, because gradients have overflowed with its loss scale.
    ///
    /// # Errors
    /// [`TrainError::NotFinite`], [`TrainError::LossScale`] and [`TrainError::StateNotFinite`], or those of the memory and of communication.
    pub fn report(&mut self) -> Result<Option<(u64, StepReport)>, TrainError> {
        let Some(step) = self.unread.pop_front() else { return Ok(None) };
        let report = self.engine.report()?.expect("the engine has a report for every step that was issued");
        let StepReport { loss, grad_norm, finite, state_finite, .. } = report;
        if !state_finite {
            // Counted from 1, it is the step before: had it been an earlier one, its report would have said so.
            return self.fail_of_state(step);
        }
        let goes_on = self.scaler.as_mut().is_some_and(|scaler| scaler.note(finite));
        if finite || goes_on {
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

    /// Asks all ranks whether the parameters and the optimizer state that `step` steps have written are finite; all of
    /// them call it, after they have read the reports of these steps. A state for which this fails must not be saved
    /// or exported.
    ///
    /// # Errors
    /// [`TrainError::StateNotFinite`] on a rank that has such a value; those of communication, also on all others.
    pub fn check_state(&mut self, step: u64) -> Result<(), TrainError> {
        if self.engine.state_is_finite()? { Ok(()) } else { self.fail_of_state(step) }
    }

    /// Fails with the first value of this rank that is not finite. A rank that has none waits for one that fails, so
    /// that the error which ends the run says where the value is.
    fn fail_of_state<T>(&mut self, step: u64) -> Result<T, TrainError> {
        if let Some(found) = first_not_finite(&self.engine, step)? {
            return Err(found);
        }
        self.meet()?;
        panic!("an update has noted a value that is not finite, and no rank finds it");
    }

    /// Evaluates all batches of all sets of evaluation data, in their order, after `step` steps. When `stop` is raised on
    /// some rank it ends after the batch under way, and there is no result.
    ///
    /// # Errors
    /// [`TrainError::EvaluationNotFinite`], [`TrainError::StateNotFinite`], or whatever failed.
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

    /// As [`RankTrainer::evaluate`], on one set.
    fn evaluate_set(
        &mut self,
        set: usize,
        step: u64,
        stop: &AtomicBool,
        order: &mut dyn IssueOrder,
        observer: &mut dyn Observer,
    ) -> Result<Option<Evaluation>, TrainError> {
        let (name, batches) = self.job.data.eval_sets().nth(set).expect("the set is there");
        let rounds = self.job.plan.step.rounds;
        let (mut sum, mut targets) = (ExactSum::default(), 0);
        for batch in 0..batches {
            let micro_batch = |round| self.job.data.eval_batch(set, batch, self.rank().0 * rounds + round);
            let data = (0..rounds).map(micro_batch).collect();
            self.set_batches(0, data)?;
            let report = self.engine.evaluate(stop.load(Ordering::Relaxed), order, observer)?;
            if !report.state_finite {
                return self.fail_of_state(step);
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

    /// Whether any rank says yes; every rank calls it.
    ///
    /// # Errors
    /// Those of communication.
    pub(crate) fn any(&mut self, yes: bool) -> Result<bool, TrainError> {
        Ok(self.engine.any(yes)?)
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// Those of communication.
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
