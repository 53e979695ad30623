//! Judges one step of another program, from its state before and after the step and the batch between.
//!
//! The first moment of an optimizer takes up the gradient by a known share, so two states one step apart contain the gradient
//! that the update really used, after everything that a framework does to it: reduction over ranks, accumulation, unscaling,
//! clipping. It is compared with the gradient of the same step computed here (`sweep`), which equals PyTorch's to rounding.
//! If they differ by more than precision allows, the step is computed again with each known fault planted (`trial`),
//! and the fault that explains the difference is named. The update itself is judged given the gradient that it used
//! (`update`), so a wrong gradient does not make a second finding of it.

mod batch;
mod gradient;
mod measure;
mod moments;
mod plan;
mod report;
mod sample;
mod saved;
mod scale;
mod state;
mod sums;
mod sweep;
mod trial;
mod update;
mod variant;
mod weighting;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use fsdp_core::model::ParamId;
use fsdp_nn::HostMemory;
use fsdp_nn::model::Architecture;

pub use batch::{MicroBatch, read_batches};
pub use plan::AuditMemory;
pub use report::{Cause, Finding, GradientRow, Report, UpdateRow};
pub use saved::{SavedOptimizer, expect_whole_moments};
pub use scale::number;
pub use variant::{Between, Setting, Variant};

use crate::checkpoint::{Foreign, ImportSummary, StateTable};
use crate::error::TrainError;
use crate::job::Job;
use crate::rule::{self, TrainBackend};
use gradient::Judge;
use moments::Moments;
use state::State;
use sums::Around;
use update::Expected;

/// Why a step cannot be judged.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// The file with the batch is wrong.
    #[error("{}: tensor {tensor}: {what}", path.display())]
    Batch {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        what: String,
    },
    /// The states are not one step apart.
    #[error(
        "{} has done {before_steps} steps and {} has done {after_steps}: an audit needs two states one step apart, saved by \
         one run (save after every step, for two steps)",
        before.display(), after.display()
    )]
    Steps {
        /// The first checkpoint.
        before: PathBuf,
        /// Its steps.
        before_steps: u64,
        /// The second checkpoint.
        after: PathBuf,
        /// Its steps.
        after_steps: u64,
    },
    /// A state has values that are not finite.
    #[error(
        "the states have values of {name} that are not finite, in the parameter or its moments, or the model computes such a \
         gradient from them: look at them with `fsdp ckpt inspect`"
    )]
    NotFinite {
        /// The parameter.
        name: String,
    },
    /// Routers are balanced over text only, and padding is in front of it.
    #[error(
        "attention_mask: rows have padding in front of text, and the balancing loss of routers cannot be computed for such \
         rows; pad behind the text for the audited step"
    )]
    LeftPadding,
    /// The optimizer keeps nothing from which its gradient follows.
    #[error(
        "train.optimizer keeps no first moment in full precision, so its state does not contain the gradient that it used; \
         adamw, lion and sgd with momentum can be judged"
    )]
    NoMoment,
    /// The moments of a state have few bits.
    #[error(
        "{} has the moments of {by} in 8 bits or fewer ({example}), so they do not contain the gradient that was used; let the \
         program make the two steps with an optimizer that keeps its moments in 16 or 32 bits",
        path.display()
    )]
    RoundedMoments {
        /// The checkpoint.
        path: PathBuf,
        /// The library that rounds them.
        by: &'static str,
        /// Name of such a moment.
        example: String,
    },
}

/// What is judged.
pub struct Audit<'a, A> {
    /// Model, optimizer and schedule as they should be. Its data is not used.
    pub job: &'a Job<A>,
    /// The state before the step.
    pub before: &'a Path,
    /// The state after the step.
    pub after: &'a Path,
    /// Steps done in the state before, if it does not say so.
    pub at_step: Option<u64>,
    /// All micro-batches of the step, over all ranks.
    pub batches: &'a [MicroBatch],
    /// Settings of the model to try if the gradient is not that of the job's.
    pub settings: &'a [Setting<A>],
    /// Compute threads.
    pub threads: usize,
    /// Ends the judgement early.
    pub stop: &'a AtomicBool,
    /// Receives what is being done.
    pub progress: &'a dyn Fn(&str),
}

/// The steps done in a state of a job, if `at_step` does not contradict it.
///
/// # Errors
/// Errors of checkpoints that cannot be read or do not fit the model.
pub fn steps_done<A>(job: &Job<A>, path: &Path, at_step: Option<u64>) -> Result<u64, TrainError> {
    let rule = HostMemory::rule(&job.config.train, &job.plan.spec)?;
    let foreign = Foreign::open(job, &StateTable::new(&job.plan, &*rule), path)?;
    Ok(foreign.steps(job, at_step, &AtomicBool::new(false), &mut ImportSummary::default())?.0)
}

impl<A: Architecture + Clone> Audit<'_, A> {
    /// Predicts the memory that the judgement needs.
    ///
    /// # Errors
    /// Errors of the model, for operations that do not fit together.
    pub fn memory(&self) -> Result<AuditMemory, TrainError> {
        let (architecture, config) = (&self.job.architecture, &self.job.config);
        let terms = config.train.loss_terms(architecture.description());
        let dtypes = [gradient::wider(config.fsdp.param_dtype), config.fsdp.param_dtype];
        AuditMemory::of(architecture, &self.job.plan.spec, terms, dtypes, self.batches)
    }

    /// Judges the step.
    ///
    /// # Errors
    /// [`AuditError`]; errors of checkpoints that cannot be read or do not fit the model; [`TrainError::Stopped`].
    pub fn judge(&self) -> Result<Report, TrainError> {
        let (job, spec) = (self.job, &self.job.plan.spec);
        expect_whole_moments(self.before)?;
        expect_whole_moments(self.after)?;
        let rule = HostMemory::rule(&job.config.train, spec)?;
        let table = StateTable::new(&job.plan, &*rule);
        let [before, after] = [self.before, self.after].map(|path| Foreign::open(job, &table, path));
        let [before, after] = [before?, after?];
        let (step, own_steps) = self.steps(&before, &after)?;
        let moments = Moments::of(&job.config.train.optimizer, step).ok_or(AuditError::NoMoment)?;
        let settings = rule::settings(&job.config.train.optimizer, spec)?;
        let trained = || (0..spec.params.len()).map(ParamId).filter(|id| spec.param(*id).trainable);
        let weight_decay: Vec<f64> =
            (0..spec.params.len()).map(|index| settings.of(ParamId(index)).weight_decay).collect();
        let coupled = |decay: &f64| if moments.is_coupled { *decay } else { 0.0 };
        let coupled_decay = weight_decay.iter().map(coupled).collect();
        let states = [&before, &after].map(|foreign| State::open(foreign, &job.init, spec, self.stop));
        let [before, after] = states;
        let around =
            Around::open([before?, after?], moments, spec, coupled_decay, job.config.train.grad_clip)?;
        let terms = job.config.train.loss_terms(job.architecture.description());
        if terms.router_loss != 0.0 && self.batches.iter().any(|batch| batch.runs_on) {
            return Err(AuditError::LeftPadding.into());
        }
        let mut judge = Judge {
            spec,
            threads: self.threads,
            stop: self.stop,
            around,
            sound: trial::sound(job.architecture.clone(), terms, self.batches),
            batches: self.batches,
            settings: self.settings,
            param_dtype: job.config.fsdp.param_dtype,
            weight_decay,
            progress: self.progress,
        };
        let judged = judge.judge()?;
        (self.progress)("judging the update");
        let expected = Expected {
            optimizer: &job.config.train.optimizer,
            lr: job.schedule.lr(step),
            settings: trained()
                .filter(|id| !judge.around.skipped.contains(id))
                .map(|id| (id, settings.of(id)))
                .collect(),
            own_steps,
            found: &judged.findings,
        };
        let (of_update, updates) = update::judge(&mut judge.around, &expected)?;
        let mut findings: Vec<Finding> = judged.findings.iter().cloned().chain(of_update).collect();
        findings.extend(judge.around.trained_although_frozen()?);
        // Neither the gradient nor the update fits: they may be those of other weights.
        let has = |causes: &[Cause]| findings.iter().any(|finding| causes.contains(&finding.cause));
        if has(&[Cause::Unexplained, Cause::DropoutActive])
            && has(&[Cause::UpdateRule, Cause::LearningRate])
            && let Some(finding) = judge.by_start(judged.distance2, &expected)?
        {
            findings = vec![finding];
        }
        let verdict = if findings.is_empty() { "sound" } else { "findings" };
        let (params, groups, bound) = (judged.params, judged.groups, judged.bound);
        Ok(Report { verdict, step, findings, bound, groups, params, updates })
    }

    /// The steps done before the judged one, and the number of that step among those of each trained parameter.
    fn steps(&self, before: &Foreign, after: &Foreign) -> Result<(u64, BTreeMap<ParamId, u64>), TrainError> {
        let mut summary = ImportSummary::default();
        let (before_steps, _) = before.steps(self.job, self.at_step, self.stop, &mut summary)?;
        let at_step = self.at_step.map(|step| step + 1);
        let (after_steps, late) = after.steps(self.job, at_step, self.stop, &mut summary)?;
        if before_steps + 1 != after_steps {
            let (before, after) = (self.before.to_owned(), self.after.to_owned());
            return Err(AuditError::Steps { before, before_steps, after, after_steps }.into());
        }
        let params = self.job.plan.spec.params.iter().enumerate().filter(|(_, param)| param.trainable);
        let own = params
            .map(|(index, param)| (ParamId(index), after_steps - late.get(&param.fqn).copied().unwrap_or(0)));
        Ok((before_steps, own.collect()))
    }
}
