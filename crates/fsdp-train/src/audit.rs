//! Judges one step of another program, from its state before and after the step and the batch between.
//!
//! The first moment of an optimizer takes up the gradient by a known share, so two states one step apart contain the gradient
//! that the update really used, after everything that a framework does to it: reduction over ranks, accumulation, unscaling,
//! clipping. It is compared with the gradient of the same step computed here (`sweep`), which equals PyTorch's to rounding.
//! If they differ by more than precision allows, the step is computed again with each known fault planted (`trial`),
//! and the fault that explains the difference is named. The update itself is judged given the gradient that it used
//! (`update`), so a wrong gradient does not make a second finding of it.

mod batch;
mod counts;
mod division;
mod fit;
mod follows;
mod gradient;
mod measure;
mod moments;
mod plan;
mod ranks;
mod report;
mod routing;
mod sample;
mod saved;
mod scale;
mod state;
mod sums;
mod sweep;
#[cfg(test)]
mod testing;
mod trial;
mod update;
mod variant;
mod weighting;
mod whole;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use fsdp_comm::launch::{FailureReason, LaunchFailure, Launcher, Seat};
use fsdp_config::OptimizerConfig;
use fsdp_core::FailureKind;
use fsdp_core::model::ParamId;
use fsdp_nn::HostMemory;
use fsdp_nn::model::Architecture;
use fsdp_nn::update::GroupSettings;

pub use batch::{MicroBatch, read_batches};
pub use counts::steps_done;
pub use division::by_step;
pub use plan::AuditMemory;
pub use report::{Cause, Finding, GradientRow, Report, UpdateRow, number};
pub use saved::{SavedOptimizer, expect_whole_moments};
pub use variant::{Between, Setting, Variant};

use crate::checkpoint::Foreign;
use crate::error::TrainError;
use crate::job::Job;
use crate::memory::Available;
use crate::rule;
use counts::Counts;
use gradient::Judge;
use moments::Moments;
use ranks::Ranks;
use state::State;
use sums::Around;
use update::Expected;
use whole::Whole;

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
    /// All micro-batches of each step, over all ranks. Of one step everything is judged, of several their whole update.
    pub steps: &'a [Vec<MicroBatch>],
    /// Settings of the model to try if the gradient is not that of the job's.
    pub settings: &'a [Setting<A>],
    /// Compute threads of each rank.
    pub threads: usize,
    /// Ends the judgement early.
    pub stop: &'a AtomicBool,
    /// Receives what is being done.
    pub progress: &'a (dyn Fn(&str) + Sync),
}

/// How long ranks of other processes leave it to the first one to report wrong input.
const FIRST_REPORT: Duration = Duration::from_secs(2);

/// What is known of the steps between both states.
#[derive(Clone)]
struct Passed {
    steps: Counts,
    /// Settings of each trained parameter.
    settings: BTreeMap<ParamId, GroupSettings>,
}

impl<A: Architecture + Clone> Audit<'_, A> {
    /// Predicts the memory that the rank of a world needs which needs most.
    ///
    /// # Errors
    /// Errors of the model, for operations that do not fit together.
    pub fn memory(&self, world: usize) -> Result<AuditMemory, TrainError> {
        let (architecture, config) = (&self.job.architecture, &self.job.config);
        let terms = config.train.loss_terms(architecture.description());
        let dtype = gradient::wider(config.fsdp.param_dtype);
        let of_step = |batches: &Vec<MicroBatch>| {
            let (model, batches) = ((architecture, &self.job.plan.spec), (&batches[..], world));
            AuditMemory::of(model, terms, dtype, batches, self.steps.len() > 1)
        };
        // Of several steps, one is computed at a time.
        let needs = self.steps.iter().map(of_step).collect::<Result<Vec<_>, _>>()?;
        Ok(needs.into_iter().max_by_key(AuditMemory::total).unwrap_or_default())
    }

    /// Judges the step with the ranks of a world. Each rank of this process comes to the same verdict.
    ///
    /// # Errors
    /// [`TrainError::Input`] for a step that cannot be judged; errors of checkpoints that cannot be read or do not fit the model;
    /// [`TrainError::Stopped`]; the first failure of any rank.
    pub fn judge<L: Launcher<Memory = HostMemory>>(
        &self,
        launcher: &L,
        world: usize,
    ) -> Result<Report, TrainError> {
        let (job, spec) = (self.job, &self.job.plan.spec);
        let optimizer = &job.config.train.optimizer;
        self.memory(world)?.expect(launcher.ranks_on_machine(world), Available::now())?;
        let moments = moments_of(optimizer, 0)?;
        for path in [self.before, self.after] {
            expect_whole_moments(path)?;
            if moments.first.is_none() {
                saved::expect_no_moments(path)?;
            }
        }
        let [before, after] = counts::open(job, [self.before, self.after])?;
        let states = [&before, &after];
        let steps = Counts::of(job, states, self.at_step, self.steps.len(), self.stop)?;
        let terms = job.config.train.loss_terms(job.architecture.description());
        if terms.has_routers() && self.steps.iter().flatten().any(|batch| batch.runs_on) {
            let message = "attention_mask: rows have padding in front of text, and the losses of routers cannot be \
                           computed for such rows; pad after the text for the audited step";
            return Err(TrainError::Input(message.to_owned()));
        }
        let groups = rule::settings(optimizer, spec)?;
        let trained = (0..spec.params.len()).map(ParamId).filter(|id| spec.param(*id).trainable);
        let settings = trained.map(|id| (id, groups.of(id))).collect();
        let passed = Passed { steps, settings };
        self.expect_rates(&passed)?;
        let assembly = launcher.assemble(world);
        let run = |seat: Seat<HostMemory>| {
            let rank = seat.rank;
            self.rank(seat, states, passed.clone()).inspect_err(|error| {
                // Mostly the input is wrong, which all ranks find at once: the first process then reports it.
                if assembly.local().start > 0 && error.kind() == FailureKind::Input {
                    thread::sleep(FIRST_REPORT);
                }
                assembly.fail(rank, error.kind(), error.to_string());
            })
        };
        let mut reports = match launcher.launch(world, &run) {
            // No matter which rank says so.
            Err(LaunchFailure { reason: FailureReason::Error(error), .. })
                if world == 1 || error.kind() == FailureKind::Input =>
            {
                return Err(error);
            }
            launched => launched?,
        };
        Ok(reports.swap_remove(0))
    }

    /// Refuses a step that shows nothing: without moments and without a learning rate.
    fn expect_rates(&self, passed: &Passed) -> Result<(), TrainError> {
        let (train, spec) = (&self.job.config.train, &self.job.plan.spec);
        let lr = self.job.schedule.lr(passed.steps.before);
        let is_derived =
            Moments::of(&train.optimizer, passed.steps.before).is_some_and(|moments| moments.first.is_none());
        let mut still = passed.settings.iter().filter(|(_, settings)| lr * settings.lr_scale == 0.0);
        match still.next().filter(|_| is_derived && self.steps.len() == 1) {
            Some((id, _)) => Err(TrainError::Input(format!(
                "the learning rate of {} is 0 in this step, and sgd without momentum shows its gradient only by what it \
                 changes: audit a step with a learning rate",
                spec.param(*id).fqn
            ))),
            None => Ok(()),
        }
    }

    fn rank(
        &self,
        seat: Seat<HostMemory>,
        states: [&Foreign; 2],
        passed: Passed,
    ) -> Result<Report, TrainError> {
        let (job, spec, ranks) = (self.job, &self.job.plan.spec, Ranks::new(seat));
        let [before, after] = states.map(|foreign| State::open(foreign, &job.init, spec, self.stop));
        let mut around = self.around([before?, after?], ranks, &passed)?;
        match self.steps {
            [batches] => self.judge_one(around, batches, passed),
            _ => self.judge_several(&mut around, passed),
        }
    }

    /// The states around the steps.
    fn around<'s>(
        &'s self,
        states: [State<'s>; 2],
        ranks: Ranks,
        passed: &Passed,
    ) -> Result<Around<'s>, TrainError> {
        let (train, spec) = (&self.job.config.train, &self.job.plan.spec);
        let step = passed.steps.before;
        let moments = moments_of(&train.optimizer, step)?;
        let groups = rule::settings(&train.optimizer, spec)?;
        let of_all = |value: &dyn Fn(GroupSettings) -> f64| -> Vec<f64> {
            (0..spec.params.len()).map(|index| value(groups.of(ParamId(index)))).collect()
        };
        let coupled = of_all(&|settings| if moments.is_coupled { settings.weight_decay } else { 0.0 });
        let lr = self.job.schedule.lr(step);
        let rates = of_all(&|settings| lr * settings.lr_scale);
        Around::open(states, ranks, moments, spec, [coupled, rates], train.grad_clip)
    }

    /// Only the first rank says what is being done.
    fn progress_of(&self, around: &Around<'_>) -> &dyn Fn(&str) {
        if around.ranks.is_first() { self.progress } else { &|_| () }
    }

    /// Judges the gradient and the update of one step.
    fn judge_one(
        &self,
        around: Around<'_>,
        batches: &[MicroBatch],
        Passed { steps: Counts { before: step, own_steps, .. }, settings }: Passed,
    ) -> Result<Report, TrainError> {
        let (job, spec) = (self.job, &self.job.plan.spec);
        let optimizer = &job.config.train.optimizer;
        let is_derived = around.moments.first.is_none();
        let progress = self.progress_of(&around);
        let groups = rule::settings(optimizer, spec)?;
        let weight_decay =
            (0..spec.params.len()).map(|index| groups.of(ParamId(index)).weight_decay).collect();
        let terms = job.config.train.loss_terms(job.architecture.description());
        let mut judge = Judge {
            spec,
            threads: self.threads,
            stop: self.stop,
            around,
            sound: trial::sound(job.architecture.clone(), terms, batches),
            batches,
            settings: self.settings,
            param_dtype: job.config.fsdp.param_dtype,
            reduce_dtype: job.config.fsdp.reduce_dtype,
            weight_decay,
            progress,
        };
        let mut judged = judge.judge()?;
        if is_derived {
            judged.findings.iter_mut().for_each(say_rate);
        }
        progress("judging the update");
        let is_used = |(id, _): &(ParamId, GroupSettings)| !judge.around.skipped.contains(id);
        let expected = Expected {
            optimizer,
            lr: job.schedule.lr(step),
            settings: settings.into_iter().filter(is_used).collect(),
            own_steps,
            found: &judged.findings,
        };
        let (of_update, updates) = update::judge(&mut judge.around, &expected)?;
        let mut findings: Vec<Finding> = judged.findings.iter().cloned().chain(of_update).collect();
        findings.extend(judge.around.trained_although_frozen()?);
        let has = |causes: &[Cause]| findings.iter().any(|finding| causes.contains(&finding.cause));
        if has(&[Cause::Unexplained, Cause::DropoutActive]) {
            // If the update does not fit either, both may be those of other weights.
            let is_wrong = has(&[Cause::UpdateRule, Cause::LearningRate]);
            match if is_wrong { judge.by_start(judged.distance2, &expected)? } else { None } {
                Some(finding) => findings = vec![finding],
                None => follows::expect(&mut judge.around, optimizer, [self.before, self.after])?,
            }
        }
        routing::expect_decided(&findings, spec, job.config.fsdp.param_dtype)?;
        let report = Report { updates, ..Report::of((step, 1), report::joined(findings), judged.rows) };
        if is_derived && report.is_sound() && report.bound >= 1.0 {
            let message = "weights move by less than their rounding in this step, and sgd without momentum shows its gradient \
                           only by what it changes: audit a step with momentum, with weights in float32, or with a larger \
                           learning rate";
            return Err(TrainError::Input(message.to_owned()));
        }
        Ok(report)
    }

    /// Judges the whole update of several steps.
    fn judge_several(&self, around: &mut Around<'_>, passed: Passed) -> Result<Report, TrainError> {
        let Passed { steps: Counts { before: step, own_steps, own_before }, settings } = passed;
        let whole = Whole {
            job: self.job,
            threads: self.threads,
            stop: self.stop,
            steps: self.steps,
            first: step,
            own_steps,
            own_before,
            settings,
            progress: self.progress_of(around),
        };
        let judged = whole.judge(around)?;
        let findings = judged.findings.into_iter().chain(around.trained_although_frozen()?).collect();
        Ok(Report::of((step, self.steps.len()), findings, judged.rows))
    }
}

/// The moments of an optimizer after `step` steps, which contain its gradient.
fn moments_of(optimizer: &OptimizerConfig, step: u64) -> Result<Moments, TrainError> {
    Moments::of(optimizer, step).ok_or_else(|| {
        let message = "train.optimizer keeps no first moment in full precision, so its state does not contain the gradient that \
                       it used; adamw, lion and sgd can be judged";
        TrainError::Input(message.to_owned())
    })
}

/// Says what weights alone do not tell: a gradient of all parameters that is scaled, or another learning rate.
fn say_rate(finding: &mut Finding) {
    if finding.cause == Cause::GradientScaled {
        finding.text +=
            ", or the learning rate was: without momentum and weight decay the two cannot be told apart";
    }
}
