//! What a run tells the log of itself, as `tracing` events.
//!
//! Each event has a fixed message, and its figures as fields, so that whoever collects logs finds them by name. The first rank
//! of a process tells them; what every rank would tell is not here.

use std::net::SocketAddr;
use std::path::Path;

use fsdp_core::memory::{Bytes, Category, Usage};
use tracing::{debug, info, warn};

use crate::checkpoint::{Outcome, Resumed, Saved};
use crate::job::Job;
use crate::metrics::{Scaling, StepMetrics, Waiting};
use crate::rank::Evaluation;

/// The part of a step that ranks must wait for another one, before it counts as slow.
const SLOW_PART: f64 = 0.1;

/// Steps in a row that a rank must be the slow one in, before it is named; then it is named each time that there are ten times
/// as many.
const SLOW_STEPS: u64 = 10;

/// A run begins, or goes on from a checkpoint: what is trained, on what, and by whom.
pub(crate) fn start<A>(job: &Job<A>, done: u64) {
    let (config, plan, data) = (&job.config, &job.plan, &job.data);
    info!(
        version = crate::VERSION,
        ranks = plan.mesh.world(),
        device = config.run.device.name(),
        steps = config.train.steps,
        done,
        out_dir = config.run.out_dir,
        "start"
    );
    info!(
        parameters = plan.spec.elements(),
        units = plan.layout.units.len(),
        mesh = %plan.mesh,
        operations = plan.step.ops.len(),
        rounds = plan.step.rounds,
        "plan"
    );
    let (samples, seq_len) = (data.samples(), data.seq_len());
    let tokens_per_step = config.train.global_batch_size * seq_len;
    info!(samples, seq_len, tokens_per_step, "training data");
    for (set, batches) in data.eval_sets() {
        info!(set, batches, "evaluation data");
    }
}

/// A run goes on from a checkpoint.
pub(crate) fn resumed(resumed: &Resumed) {
    let Resumed { step, path, changes, .. } = resumed;
    info!(step, path = %path.display(), changes = changes.len(), "going on");
}

/// What a rank will hold at most, by category, as the ledger predicts it.
pub(crate) fn predicted_memory(usage: &Usage) {
    let (device_bytes, host_bytes) = (usage.device.total_peak_bytes, usage.host.total_peak_bytes);
    info!(device_bytes, host_bytes, "memory of a rank, predicted");
    let by_category = |place: &str, bytes: &Bytes| {
        let peaks = Category::ALL.map(|category| (category.name(), bytes.peak(category)));
        for (category, bytes) in peaks.into_iter().filter(|&(_, bytes)| bytes > 0) {
            debug!(place, category, bytes, "memory of a rank, predicted");
        }
    };
    by_category("device", &usage.device);
    by_category("host", &usage.host);
}

/// A step is done.
pub(crate) fn step(metrics: &StepMetrics) {
    let StepMetrics { step, loss, grad_norm, lr, tokens_per_s, step_ms, .. } = *metrics;
    debug!(step, loss, grad_norm, lr, tokens_per_s, step_ms, "step");
    if let Some(Scaling { loss_scale, skipped: true }) = metrics.scaling {
        info!(step, loss_scale, "gradients have overflowed in f16: the step is skipped");
    }
}

/// An evaluation begins.
pub(crate) fn evaluation_begins(step: u64) {
    debug!(step, "evaluation begins");
}

/// A set was evaluated on.
pub(crate) fn evaluation(step: u64, evaluation: &Evaluation) {
    let Evaluation { set, loss, targets } = evaluation;
    info!(step, set, loss, perplexity = evaluation.perplexity(), tokens = targets, "evaluation");
}

/// A checkpoint of this step is begun.
pub(crate) fn checkpoint_begins(step: u64) {
    debug!(step, "checkpoint begun");
}

/// A checkpoint is complete, or has failed.
pub(crate) fn checkpoint(outcome: &Outcome) {
    match outcome {
        Ok(Saved { step, path, bytes, elapsed }) => {
            let seconds = elapsed.as_secs_f64();
            info!(step, path = %path.display(), bytes, seconds, "checkpoint committed");
        }
        Err(failure) => warn!(step = failure.step, error = %failure, "checkpoint failed"),
    }
}

/// Prometheus may ask.
pub(crate) fn listening(address: SocketAddr) {
    info!(%address, "metrics are exposed");
}

/// The model is exported.
pub(crate) fn exported(model: &Path) {
    info!(path = %model.display(), "model exported");
}

/// Watches for a rank that the others wait for, step after step.
#[derive(Debug, Default)]
pub(crate) struct SlowRank {
    rank: usize,
    /// Steps in a row.
    steps: u64,
}

impl SlowRank {
    /// Notes how long the ranks of a step waited that took `step_ms`; tells the log of a rank that is slow.
    pub(crate) fn note(&mut self, waiting: &Waiting, step_ms: f64) {
        let lost_ms = waiting.wait_ms_max - waiting.wait_ms_min;
        if let Some(steps) = self.count(waiting.slowest_rank, lost_ms > SLOW_PART * step_ms) {
            let (step, rank) = (waiting.wait_step, waiting.slowest_rank);
            warn!(
                step,
                rank, steps, lost_ms, step_ms, "slow rank: others have waited for it in all of these steps"
            );
        }
    }

    /// For how many steps in a row this rank has been slow, when that is to be told.
    fn count(&mut self, rank: usize, is_slow: bool) -> Option<u64> {
        match (is_slow, rank == self.rank) {
            (false, _) => self.steps = 0,
            (true, true) => self.steps += 1,
            (true, false) => *self = Self { rank, steps: 1 },
        }
        let is_told = self.steps >= SLOW_STEPS && self.steps == 10_u64.pow(self.steps.ilog10());
        is_told.then_some(self.steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_named_after_ten_slow_steps_in_a_row_and_then_ever_more_seldom() {
        let mut slow = SlowRank::default();
        let told: Vec<u64> = (1..=2000).filter(|_| slow.count(3, true).is_some()).collect();
        assert_eq!(told, [10, 100, 1000]);
    }

    #[test]
    fn another_rank_or_a_step_without_waiting_begins_anew() {
        let mut slow = SlowRank::default();
        for _ in 0..20 {
            assert!((0..9).all(|_| slow.count(1, true).is_none()));
            slow.count(1, false);
            assert!((0..9).all(|_| slow.count(2, true).is_none()));
        }
        assert_eq!(slow.count(2, true), Some(10));
    }
}
