//! Evaluating a model without training it.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use fsdp_comm::launch::{Launcher, Seat};
use fsdp_core::FailureKind;
use fsdp_core::engine::ProgramOrder;
use fsdp_core::memory::Usage;
use fsdp_nn::Backend;
use fsdp_nn::model::Architecture;

use crate::checkpoint::SavedModel;
use crate::error::TrainError;
use crate::events;
use crate::job::Job;
use crate::memory::expect_room_to_train;
use crate::metrics::Evaluation;
use crate::rank::RankTrainer;

/// The result of an evaluation.
#[derive(Clone, Debug)]
pub struct Evaluated {
    /// One result per evaluation set, in the order of the configuration.
    pub evaluations: Vec<Evaluation>,
    /// Memory usage of each rank of this process.
    pub usage: Vec<Usage>,
    /// Wall time, including the time to read the weights.
    pub elapsed: Duration,
}

/// Evaluates a model on the evaluation sets of a job created by [`Job::to_evaluate`]. Losses are bitwise equal to those
/// that training computes for the same weights. Weights come from `saved`, or from the job's source if that is `None`.
///
/// # Errors
/// [`TrainError`]: not enough memory, weights of another model, or the first failure of any rank.
pub fn evaluate<L: Launcher<Memory: Backend>, A: Architecture + Clone>(
    job: &Job<A>,
    launcher: &L,
    saved: Option<&SavedModel>,
) -> Result<Evaluated, TrainError> {
    let world = job.plan.mesh.world();
    if let Some(saved) = saved {
        saved.check(&job.architecture.description().spec, &job.init)?;
    }
    expect_room_to_train::<L::Memory, A>(job, launcher.ranks_on_machine(world))?;
    events::evaluation_begins(0);
    let begin = Instant::now();
    let ranks = launcher.launch(world, &|seat: Seat<L::Memory>| rank(job, seat, saved))?;
    let usage = ranks.iter().map(|(_, usage)| *usage).collect();
    let evaluations = ranks.into_iter().next().map_or_else(Vec::new, |(evaluations, _)| evaluations);
    Ok(Evaluated { evaluations, usage, elapsed: begin.elapsed() })
}

fn rank<M: Backend, A: Architecture + Clone>(
    job: &Job<A>,
    seat: Seat<M>,
    saved: Option<&SavedModel>,
) -> Result<(Vec<Evaluation>, Usage), TrainError> {
    let mut trainer = RankTrainer::to_evaluate(job, seat, saved)?;
    let evaluated = trainer.evaluate(0, &AtomicBool::new(false), &mut ProgramOrder, &mut ());
    let evaluations = evaluated.map_err(|error| match error {
        TrainError::EvaluationNotFinite { set, loss, .. } => {
            let message = format!(
                "the loss on \"{set}\" is {loss}: the weights contain values that are not finite, or activations overflow in \
                 fsdp.param_dtype; check them with `fsdp ckpt inspect`, or evaluate in f32"
            );
            TrainError::Failed { kind: FailureKind::Permanent, message }
        }
        other => other,
    })?;
    Ok((evaluations.expect("nobody asks to stop"), trainer.usage()))
}

#[cfg(test)]
mod tests;
