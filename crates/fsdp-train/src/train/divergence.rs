//! Where a run can resume after its loss or state has become non-finite.
//!
//! Loss and gradient of a step are computed from the weights of the step before. No learning rate makes them finite, so
//! a run must go back further: to the newest state whose own loss is sound ([`Losses`]), and from which the run has not
//! already failed with rates down to a thousandth of the highest. All newer states are set aside, so that `--resume`
//! finds that one. A run that fails again gets other advice than before, and in the end the one to start over.
//!
//! A run whose loss grows without end may also stay finite until its last step. It is told the same, but its states stay.

mod attempts;

use std::fmt;
use std::path::PathBuf;

use fsdp_ckpt::native::RunLock;

use super::losses::{Losses, Spoiled};
use crate::error::TrainError;

pub(super) use attempts::Attempts;

/// Where a run can resume after a divergence, and what became of the states that it cannot resume from.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Divergence {
    /// The checkpoints that were set aside, newest first.
    pub(super) aside: Vec<SetAside>,
    /// Why a checkpoint could not be set aside, although a run would resume from it, or why this failure could not be
    /// recorded.
    pub(super) faults: Vec<String>,
    /// The newest checkpoint worth continuing, with its number of steps.
    pub(super) newest: Option<(u64, PathBuf)>,
    /// The lowest learning rate with which the run diverged from there; `None` if the update rule has none.
    pub(super) failed_lr: Option<f64>,
    /// The number of steps after which this start began, if one with the same learning rate, or a lower one, had failed from
    /// there before.
    pub(super) repeated: Option<u64>,
}

/// A run that came to its end with a loss that no run should continue from.
#[derive(Clone, Debug, PartialEq)]
pub struct Exploded {
    /// What is wrong with the last step.
    reason: Unfit,
    /// Where the run can resume instead.
    instead: Divergence,
}

/// A checkpoint that was renamed, because no run should resume from it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SetAside {
    /// Steps done.
    pub(super) step: u64,
    /// Its new name.
    pub(super) path: PathBuf,
    /// What is wrong with it.
    pub(super) reason: Unfit,
}

/// Why a run should not resume from a state.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Unfit {
    /// Its weights give a loss or gradient that is not finite.
    NotFinite,
    /// Its loss is too high, beside the first loss of the run.
    Loss {
        /// The loss.
        loss: f64,
        /// The first loss of the run.
        first: f64,
    },
    /// Its gradient is zero, so no step would change it.
    Dead,
    /// The run diverged from there with all of these learning rates.
    Failed {
        /// The lowest rate; `None` if the update rule has none.
        lowest: Option<f64>,
        /// The highest rate.
        highest: Option<f64>,
    },
}

/// The start of the run that has diverged.
pub(super) struct Began<'a> {
    /// The lock of the output folder.
    pub(super) lock: &'a RunLock,
    /// Steps done when it began.
    pub(super) step: u64,
    /// The learning rate of the run file, if it has one.
    pub(super) lr: Option<f64>,
}

impl Divergence {
    /// Sets aside the checkpoints that should not be resumed from, if `error` is a divergence, and finds the newest one
    /// that is worth it. Returns other errors unchanged, and every error if there is no lock of the output folder.
    pub(super) fn of(error: TrainError, began: Option<Began<'_>>, losses: &Losses) -> TrainError {
        let (TrainError::RankFailed { source, .. }, Some(began)) = (&error, began) else { return error };
        let diverged_step = match **source {
            TrainError::NotFinite { step, .. } | TrainError::LossScale { step, .. } => step - 1,
            // The weights of this step are finite, but their loss is not.
            TrainError::EvaluationNotFinite { step, .. } => step,
            // Such a state is never saved.
            TrainError::StateNotFinite { step, .. } => step,
            _ => return error,
        };
        let advice = Self::at(diverged_step, &began, losses).to_string();
        TrainError::Diverged { source: Box::new(error), advice }
    }

    fn at(diverged_step: u64, began: &Began<'_>, losses: &Losses) -> Self {
        let run = began.lock.run();
        let (attempts, mut found) = Self::recorded(diverged_step, began);
        let steps = run.steps().unwrap_or_default();
        for step in steps.into_iter().rev().filter(|&step| step <= diverged_step) {
            let reason = match step == diverged_step {
                true => Some(Unfit::NotFinite),
                false => unfit_loss(step, losses).or_else(|| attempts.given_up(step)),
            };
            let Some(reason) = reason else {
                found.newest = Some((step, run.checkpoint(step)));
                break;
            };
            match began.lock.set_aside(step, "diverged") {
                Ok(path) => found.aside.extend(path.map(|path| SetAside { step, path, reason })),
                Err(error) => {
                    let path = run.checkpoint(step);
                    found
                        .faults
                        .push(format!("remove {}, which could not be set aside ({error})", path.display()));
                }
            }
        }
        found.failed_lr = attempts.lowest_lr(found.newest.as_ref().map_or(0, |(step, _)| *step));
        found
    }

    /// Records a failure after `until` steps, beside those before.
    fn recorded(until: u64, began: &Began<'_>) -> (Attempts, Self) {
        let out_dir = began.lock.run().out_dir();
        let mut attempts = Attempts::read(out_dir);
        let has_failed =
            attempts.lowest_lr(began.step).zip(began.lr).is_some_and(|(failed, lr)| failed <= lr);
        attempts.add(began.step, until, began.lr);
        let mut found = Self { repeated: has_failed.then_some(began.step), ..Self::default() };
        if let Err(error) = attempts.write(out_dir) {
            found.faults.push(format!("that it diverged could not be recorded ({error})"));
        }
        (attempts, found)
    }

    /// What to say of a run that has ended after `done` steps, if the losses of its last two steps are none to continue from:
    /// one alone may be that of a hard batch.
    pub(super) fn at_end(done: u64, began: &Began<'_>, losses: &Losses) -> Option<Exploded> {
        let before = done.checked_sub(1).filter(|_| done > began.step)?;
        let reason = unfit_loss(before, losses)?;
        unfit_loss(before.checked_sub(1)?, losses)?;
        let (attempts, mut instead) = Self::recorded(done, began);
        let run = began.lock.run();
        let steps = run.steps().unwrap_or_default().into_iter().rev().filter(|&step| step < before);
        instead.newest = steps
            .filter(|&step| unfit_loss(step, losses).is_none() && attempts.given_up(step).is_none())
            .map(|step| (step, run.checkpoint(step)))
            .next();
        instead.failed_lr = attempts.lowest_lr(instead.newest.as_ref().map_or(0, |(step, _)| *step));
        Some(Exploded { reason, instead })
    }

    /// What to set in the run file, for a way out that lowers the learning rate.
    fn lower(&self) -> String {
        let lr = self.failed_lr.map(|failed| {
            format!(" (train.optimizer.lr = {:.1e} or less, since {failed:e} failed)", failed / 10.0)
        });
        format!("a lower learning rate{}", lr.unwrap_or_default())
    }
}

/// Why the loss of a state is not one to continue from; `None` if it is, or is not known.
fn unfit_loss(step: u64, losses: &Losses) -> Option<Unfit> {
    match losses.judge(step)?.err()? {
        Spoiled::High(loss) => Some(Unfit::Loss { loss, first: losses.first().unwrap_or(loss) }),
        Spoiled::Dead => Some(Unfit::Dead),
    }
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Newer states of a run that went wrong earlier are all alike.
        const SHOWN: usize = 3;
        for SetAside { step, path, reason } in self.aside.iter().take(SHOWN) {
            write!(f, "the checkpoint after step {step} is set aside as {}: {reason}; ", path.display())?;
        }
        if let Some(more) = self.aside.len().checked_sub(SHOWN).filter(|&more| more > 0) {
            write!(f, "{more} more were set aside likewise; ")?;
        }
        self.write_before(f)?;
        let lower = self.lower();
        match &self.newest {
            Some((step, path)) => write!(
                f,
                "with {lower}, --resume continues from step {step}, the newest checkpoint worth continuing ({})",
                path.display()
            ),
            None if self.aside.is_empty() => write!(
                f,
                "there is no earlier checkpoint: start over with {lower} and --overwrite, and save more often \
                 (checkpoint.every)"
            ),
            None => self.write_start_over(f),
        }
    }
}

impl Divergence {
    /// What precedes the way out.
    fn write_before(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.faults.iter().try_for_each(|fault| write!(f, "{fault}; "))?;
        match self.repeated {
            Some(step) => {
                write!(f, "a run from step {step} had failed with this learning rate or a lower one before; ")
            }
            None => Ok(()),
        }
    }

    fn write_start_over(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "no saved state is worth continuing: start over (--overwrite) with {}, clipped gradients (train.grad_clip) or \
             a longer warm-up (train.lr_schedule.warmup_steps)",
            self.lower()
        )
    }
}

impl fmt::Display for Exploded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { reason, instead } = self;
        write!(f, "the last state is not worth continuing: {reason}; ")?;
        instead.write_before(f)?;
        match &instead.newest {
            Some((step, path)) => write!(
                f,
                "with {}, --resume-from {} --overwrite continues from step {step}, the newest checkpoint worth it",
                instead.lower(),
                path.display()
            ),
            None => instead.write_start_over(f),
        }
    }
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unfit::NotFinite => f.write_str("its loss or gradient is not finite"),
            Unfit::Loss { loss, first } => {
                write!(f, "its loss is {loss:.4e}, and the run began with {first:.4}")
            }
            Unfit::Dead => f.write_str("its gradient is zero, so no step would change it"),
            Unfit::Failed { lowest: Some(lowest), highest: Some(highest) } => {
                write!(f, "the run diverged from there with learning rates from {highest:e} to {lowest:e}")
            }
            Unfit::Failed { .. } => f.write_str("the run diverged again from there"),
        }
    }
}

#[cfg(test)]
mod tests;
