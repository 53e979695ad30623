//! What a step and an evaluation report, and everything that they report to. The trainer measures; the clock that is read here
//! is the time of day that some forms of metrics ask for.

mod csv;
mod experts;
mod exposition;
mod file;
mod mlflow;
mod recorder;
mod tensorboard;

use std::time::Duration;

use fsdp_comm::process::cluster;
use fsdp_core::engine::StepReport;
use fsdp_nn::model::{Counted, StepParts};
use serde::Serialize;

use crate::rank::Evaluation;

pub(crate) use csv::{EVALUATIONS, STEPS};
pub use experts::ExpertLoads;
pub(crate) use exposition::Exposition;
use file::MetricsFile;
pub(crate) use file::{METRICS, last_step, last_step_in};
pub(crate) use mlflow::MLFLOW;
pub(crate) use recorder::Recorder;
pub(crate) use tensorboard::TENSORBOARD;

/// The line of a step in `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepMetrics {
    /// The step, from 1.
    pub step: u64,
    /// Mean loss over the counted tokens of the global batch, before the update: cross-entropy, with the terms that training
    /// adds.
    pub loss: f64,
    /// Global L2 norm of the gradient, before clipping.
    pub grad_norm: f64,
    /// The learning rate that this step used.
    pub lr: f64,
    /// Input tokens of the global batch: all positions, padding included.
    pub tokens: u64,
    /// Targets of the global batch that count in the loss: neither padding nor masked.
    pub targets: u64,
    /// Tokens per second, over all ranks.
    pub tokens_per_s: f64,
    /// Wall time of the step.
    pub step_ms: f64,
    /// How gradients were scaled, where they were.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<Scaling>,
    /// Model FLOP/s over peak FLOP/s, where the peak is known.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub utilization: Option<Utilization>,
    /// How long ranks waited for each other, where that is known of a step that no line has told yet.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<Waiting>,
    /// What the loss is made of, where training adds something to the cross-entropy.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub parts: Option<LossParts>,
    /// Where tokens went, in a model with mixtures of experts.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertLoads>,
}

/// The parts of a step's loss: means over its counted targets, with their coefficients, of which it is the sum.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LossParts {
    /// Cross-entropy; with smoothed labels, if training smooths them.
    pub cross_entropy: f64,
    /// The z-loss, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub z_loss: Option<f64>,
    /// The balancing loss of routers, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_loss: Option<f64>,
}

impl LossParts {
    /// The parts of a step's loss, if it has more than one. `parts` are sums over all targets.
    #[expect(clippy::cast_precision_loss, reason = "a number of tokens")]
    fn of(report: &StepReport, parts: &StepParts, router_loss: bool) -> Option<Self> {
        let mean = |sum: f64| sum / report.targets.max(1) as f64;
        let router_loss = parts.router_loss.filter(|_| router_loss).map(mean);
        let z_loss = parts.z_loss.map(mean);
        let added = [z_loss, router_loss].into_iter().flatten().reduce(|a, b| a + b)?;
        Some(Self { cross_entropy: report.loss - added, z_loss, router_loss })
    }
}

/// What a model tells of a step beside its loss; `router_loss` says whether training balances its routers.
pub(crate) fn parts(
    report: &StepReport,
    counted: Counted,
    router_loss: bool,
) -> (Option<LossParts>, Option<ExpertLoads>) {
    let parts = counted.read(report);
    (LossParts::of(report, &parts, router_loss), ExpertLoads::of(parts.loads))
}

/// How the gradients of a step in f16 were scaled.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Scaling {
    /// What they were multiplied with.
    pub loss_scale: f64,
    /// Whether they have overflowed, so that the step was skipped.
    pub skipped: bool,
}

/// The line of an evaluation on one set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvalMetrics {
    /// How many steps were done.
    pub step: u64,
    /// The name of the set.
    pub set: String,
    /// Mean cross-entropy over the counted tokens of the set.
    pub eval_loss: f64,
    /// e to that loss.
    pub eval_perplexity: f64,
    /// How many tokens counted.
    pub eval_tokens: u64,
}

impl EvalMetrics {
    /// The line of an evaluation after `step` steps.
    pub(crate) fn of(step: u64, evaluation: &Evaluation) -> Self {
        let Evaluation { set, loss, targets } = evaluation;
        let eval_perplexity = evaluation.perplexity();
        Self { step, set: set.clone(), eval_loss: *loss, eval_perplexity, eval_tokens: *targets }
    }
}

/// How long the ranks of a step waited in its collectives: for ranks that came later, and for the data on its way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Waiting {
    /// The step, as [`StepMetrics::step`]: one before the line's, since ranks tell it when a step is over.
    pub wait_step: u64,
    /// The mean over all ranks.
    pub wait_ms: f64,
    /// That of the rank which waited longest.
    pub wait_ms_max: f64,
    /// That of the rank which waited least. What others waited beyond it, they waited for it.
    pub wait_ms_min: f64,
    /// The rank which waited least: the one that all others wait for.
    pub slowest_rank: usize,
}

impl Waiting {
    /// What the ranks of a step say, in their order: how long each one waited.
    ///
    /// # Panics
    /// Without ranks.
    #[expect(clippy::cast_precision_loss, reason = "a number of ranks")]
    pub(crate) fn of(step: u64, waited: &[Duration]) -> Self {
        let ms = |waited: &Duration| waited.as_secs_f64() * 1e3;
        let slowest = waited.iter().enumerate().min_by_key(|(_, waited)| **waited);
        let (slowest_rank, least) = slowest.expect("a world has ranks");
        Self {
            wait_step: step,
            wait_ms: waited.iter().map(ms).sum::<f64>() / waited.len() as f64,
            wait_ms_max: waited.iter().max().map_or(0.0, ms),
            wait_ms_min: ms(least),
            slowest_rank,
        }
    }
}

/// Who takes part in a run, and how they are connected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Census {
    /// What carries data between ranks.
    pub transport: String,
    /// The processes, in the order of their ranks.
    pub processes: Vec<Participant>,
}

/// A process of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Participant {
    /// Name of its machine.
    pub host: String,
    /// Number of the process there.
    pub pid: u32,
    /// What its ranks compute on, as run files name it.
    pub device: String,
    /// Model of its CPU: bits are promised on one model.
    pub cpu: String,
    /// The first of its ranks, which follow each other.
    pub first_rank: usize,
    /// How many ranks it holds.
    pub ranks: usize,
}

impl Census {
    /// A run whose ranks are threads of this process.
    pub(crate) fn alone(device: &str, ranks: usize) -> Self {
        let (host, pid, cpu) = (cluster::host(), std::process::id(), cluster::cpu_model());
        let this = Participant { host, pid, device: device.to_owned(), cpu, first_rank: 0, ranks };
        Self { transport: "threads".to_owned(), processes: vec![this] }
    }
}

/// Model FLOP/s utilization, by two conventions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Utilization {
    /// With 6N + 12·L·d·T FLOPs per token (`PaLM`, appendix B).
    pub mfu: f64,
    /// With 6N FLOPs per token: the formula of the XLA FSDP reports.
    pub mfu_6n: f64,
}

/// What the FLOPs of a token depend on.
///
/// Per token, the forward multiplies and adds once with each of the N parameters (2N FLOPs) and the
/// backward twice (4N): 6N; but only once with what is frozen, which has no gradient. Attention adds scores and weighted values, each 2·d·T FLOPs per layer and
/// token, three times (forward, and twice in backward): 12·L·d·T, not halved for causality. Recomputation
/// does not count.
///
/// This is a convention, so that runs of different trainers can be compared, and not what is executed: that is the
/// [`Cost`](fsdp_nn::op::Cost) of each call. The convention can not be stated as a sum of these. It multiplies with every
/// parameter, where embedding tables, norms and biases are in no product; it does not halve attention for causality, where
/// calls skip what is masked; and calls of the backward compute what was not kept, attention's probabilities for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlopModel {
    /// N: parameters that a token meets, tied ones once: of a mixture those of the experts that it is sent to.
    pub parameter_count: u64,
    /// How many of them are trained.
    pub trained_count: u64,
    /// L: layers.
    pub layer_count: u64,
    /// d: heads times head dim.
    pub attention_width: u64,
    /// T: inputs per sample.
    pub seq_len: u64,
}

impl FlopModel {
    /// 6N; 4N of what is frozen.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn flops_per_token_6n(&self) -> f64 {
        4.0 * self.parameter_count as f64 + 2.0 * self.trained_count as f64
    }

    /// 6N + 12·L·d·T.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn flops_per_token(&self) -> f64 {
        let attention = self.layer_count as f64 * self.attention_width as f64 * self.seq_len as f64;
        self.flops_per_token_6n() + 12.0 * attention
    }

    /// The utilization of `ranks` ranks with `peak_tflops` TFLOP/s each that process `tokens_per_s`
    /// together.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn utilization(&self, tokens_per_s: f64, ranks: usize, peak_tflops: f64) -> Utilization {
        let peak_flops_per_s = peak_tflops * 1e12 * ranks as f64;
        Utilization {
            mfu: self.flops_per_token() * tokens_per_s / peak_flops_per_s,
            mfu_6n: self.flops_per_token_6n() * tokens_per_s / peak_flops_per_s,
        }
    }
}

#[cfg(test)]
mod tests;
