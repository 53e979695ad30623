//! The `tracing` events of a run.
//!
//! Each event has a fixed message and its values as fields, so that log collectors find them by name. The first rank of
//! each process emits them; there are no events per rank.

use std::net::SocketAddr;
use std::path::Path;

use fsdp_core::memory::{Bytes, Category, Usage};
use tracing::{debug, info, warn};

use crate::checkpoint::{Outcome, Saved};
use crate::error::TrainError;
use crate::job::Job;
use crate::metrics::{Evaluation, Scaling, StepMetrics, Waiting};

/// The fraction of a step that other ranks must wait for a rank before it counts as slow.
const SLOW_FRACTION: f64 = 0.1;

/// Number of consecutive steps in which a rank must be the slow one before it is reported; after that it is reported at
/// each tenfold count.
const SLOW_STEPS: u64 = 10;

/// A run begins or resumes: what it trains, on which data and devices.
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

/// The run resumes from a checkpoint.
pub(crate) fn resumed(step: u64, path: &Path, changes: usize) {
    info!(step, path = %path.display(), changes, "resuming");
}

/// The predicted peak memory of a rank, by category, from the ledger.
pub(crate) fn predicted_memory(usage: &Usage) {
    let (device_bytes, host_bytes) = (usage.device.total_peak_bytes, usage.host.total_peak_bytes);
    info!(device_bytes, host_bytes, "predicted memory of a rank");
    let by_category = |place: &str, bytes: &Bytes| {
        let peaks = Category::ALL.map(|category| (category.name(), bytes.peak(category)));
        for (category, bytes) in peaks.into_iter().filter(|&(_, bytes)| bytes > 0) {
            debug!(place, category, bytes, "predicted memory of a rank");
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

/// The result of an evaluation on one set.
pub(crate) fn evaluation(step: u64, evaluation: &Evaluation) {
    let Evaluation { set, loss, targets } = evaluation;
    info!(step, set, loss, perplexity = evaluation.perplexity(), tokens = targets, "evaluation");
}

/// The save of this step has begun.
pub(crate) fn checkpoint_begins(step: u64) {
    debug!(step, "checkpoint begun");
}

/// A checkpoint is complete, or its save has failed.
pub(crate) fn checkpoint(outcome: &Outcome) {
    match outcome {
        Ok(Saved { step, path, bytes, elapsed }) => {
            let seconds = elapsed.as_secs_f64();
            info!(step, path = %path.display(), bytes, seconds, "checkpoint committed");
        }
        Err(error) => {
            let step = if let TrainError::NotSaved { step, .. } = error { Some(*step) } else { None };
            warn!(step, %error, "checkpoint failed");
        }
    }
}

/// The Prometheus endpoint is open.
pub(crate) fn listening(address: SocketAddr) {
    info!(%address, "serving metrics");
}

/// The model has been exported.
pub(crate) fn exported(model: &Path) {
    info!(path = %model.display(), "model exported");
}

/// Detects a rank that the others wait for, step after step.
#[derive(Debug, Default)]
pub(crate) struct SlowRank {
    rank: usize,
    /// Consecutive steps in which `rank` was slow.
    steps: u64,
}

impl SlowRank {
    /// Records how long ranks waited in a step of `step_ms`, and reports a slow rank.
    pub(crate) fn note(&mut self, waiting: &Waiting, step_ms: f64) {
        let lost_ms = waiting.wait_ms_max - waiting.wait_ms_min;
        if let Some(steps) = self.count(waiting.slowest_rank, lost_ms > SLOW_FRACTION * step_ms) {
            let (step, rank) = (waiting.wait_step, waiting.slowest_rank);
            warn!(
                step,
                rank, steps, lost_ms, step_ms, "slow rank: others have waited for it in all of these steps"
            );
        }
    }

    /// The number of consecutive steps in which this rank has been slow; `None` if there is nothing to report.
    fn count(&mut self, rank: usize, is_slow: bool) -> Option<u64> {
        match (is_slow, rank == self.rank) {
            (false, _) => self.steps = 0,
            (true, true) => self.steps += 1,
            (true, false) => *self = Self { rank, steps: 1 },
        }
        let is_reported = self.steps >= SLOW_STEPS && self.steps == 10_u64.pow(self.steps.ilog10());
        is_reported.then_some(self.steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_rank_is_reported_after_10_100_and_1000_steps() {
        let mut slow = SlowRank::default();
        let reported: Vec<u64> = (1..=2000).filter(|_| slow.count(3, true).is_some()).collect();
        assert_eq!(reported, [10, 100, 1000]);
    }

    #[test]
    fn slow_step_count_resets_on_other_rank_or_no_wait() {
        let mut slow = SlowRank::default();
        for _ in 0..20 {
            assert!((0..9).all(|_| slow.count(1, true).is_none()));
            slow.count(1, false);
            assert!((0..9).all(|_| slow.count(2, true).is_none()));
        }
        assert_eq!(slow.count(2, true), Some(10));
    }
}
