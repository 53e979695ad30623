//! What is measured of steps, evaluations and processes, as the lines of `metrics.jsonl` have it.

use std::time::Duration;

use fsdp_comm::process::cluster;
use fsdp_core::engine::StepReport;
use fsdp_nn::model::{Counted, StepParts};
use fsdp_nn::op::LossTerms;
use serde::Serialize;

use super::experts::ExpertLoads;

/// The line of a step in `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepMetrics {
    /// The step, from 1.
    pub step: u64,
    /// Mean loss over the counted tokens of the global batch, before the update: cross-entropy plus the terms that
    /// training adds.
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
    /// Wall time of the step, in milliseconds.
    pub step_ms: f64,
    /// Scaling of the gradients; `None` if they are not scaled.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<Scaling>,
    /// Model FLOP/s over peak FLOP/s; `None` if the peak is unknown.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub utilization: Option<Utilization>,
    /// Time that ranks waited for each other; `None` if no step has new measurements.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<Waiting>,
    /// Components of the loss; `None` if training adds nothing to the cross-entropy.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub parts: Option<LossParts>,
    /// Distribution of tokens over experts; `None` for a model without mixtures of experts.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertLoads>,
}

impl StepMetrics {
    /// What this step tells about the weights before its update.
    pub(crate) fn step_loss(&self) -> StepLoss {
        StepLoss { step: self.step, loss: self.loss, grad_norm: self.grad_norm }
    }
}

/// The loss and gradient norm of a step, counted from 1, both of the weights before its update: NaN if not finite.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StepLoss {
    pub(crate) step: u64,
    pub(crate) loss: f64,
    pub(crate) grad_norm: f64,
}

/// The components of a step's loss, which add up to it: means over the counted targets, including their coefficients.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LossParts {
    /// Cross-entropy, with smoothed labels if training smooths them.
    pub cross_entropy: f64,
    /// The z-loss; `None` if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub z_loss: Option<f64>,
    /// The load-balancing loss of routers; `None` if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_loss: Option<f64>,
    /// The z-loss of routers; `None` if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_z_loss: Option<f64>,
    /// The sequence-wise balance loss of routers; `None` if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_sequence_loss: Option<f64>,
}

impl LossParts {
    /// Returns the components of a step's loss; `None` if there is only one. `parts` are sums over all targets.
    #[expect(clippy::cast_precision_loss, reason = "a number of tokens")]
    fn of(report: &StepReport, parts: &StepParts, terms: LossTerms) -> Option<Self> {
        let mean = |sum: f64| sum / report.targets.max(1) as f64;
        let of = |sum: Option<f64>, coefficient: f64| sum.filter(|_| coefficient > 0.0).map(mean);
        let parts = Self {
            cross_entropy: report.loss,
            z_loss: of(parts.z_loss, terms.z_loss),
            router_loss: of(parts.router_loss, terms.router_loss),
            router_z_loss: of(parts.router_z_loss, terms.router_z_loss),
            router_sequence_loss: of(parts.router_sequence_loss, terms.router_sequence_loss),
        };
        let added = [parts.z_loss, parts.router_loss, parts.router_z_loss, parts.router_sequence_loss];
        let added = added.into_iter().flatten().reduce(|a, b| a + b)?;
        Some(Self { cross_entropy: report.loss - added, ..parts })
    }
}

/// Returns the metrics that a model reports besides its loss, in training with these terms.
pub(crate) fn parts(
    report: &StepReport,
    counted: Counted,
    terms: LossTerms,
) -> (Option<LossParts>, Option<ExpertLoads>) {
    let parts = counted.read(report);
    (LossParts::of(report, &parts, terms), ExpertLoads::of(parts.loads))
}

/// Scaling of the gradients of a step in f16.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Scaling {
    /// The factor by which they were multiplied.
    pub loss_scale: f64,
    /// Whether they overflowed, so that the step was skipped.
    pub skipped: bool,
}

/// The result of an evaluation on one set.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// The name of the set.
    pub set: String,
    /// Mean loss over the counted targets of all batches.
    pub loss: f64,
    /// Number of counted targets.
    pub targets: u64,
}

impl Evaluation {
    /// e to the mean loss per target; infinity if that exceeds the range of `f64`.
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }
}

/// The line of an evaluation on one set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvalMetrics {
    /// Number of steps done.
    pub step: u64,
    /// Name of the set.
    pub set: String,
    /// Mean cross-entropy over the counted tokens of the set.
    pub eval_loss: f64,
    /// e to the power of `eval_loss`.
    pub eval_perplexity: f64,
    /// Number of tokens that counted.
    pub eval_tokens: u64,
}

impl EvalMetrics {
    /// Creates the line of an evaluation after `step` steps.
    pub(crate) fn of(step: u64, evaluation: &Evaluation) -> Self {
        let Evaluation { set, loss, targets } = evaluation;
        let eval_perplexity = evaluation.perplexity();
        Self { step, set: set.clone(), eval_loss: *loss, eval_perplexity, eval_tokens: *targets }
    }
}

/// Time that ranks waited in the collectives of a step: for slower ranks, and for the transfer of data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Waiting {
    /// The measured step, as [`StepMetrics::step`]. It precedes the step of the line, because ranks report after a step
    /// ends.
    pub wait_step: u64,
    /// Mean over all ranks, in milliseconds.
    pub wait_ms: f64,
    /// Maximum over all ranks, in milliseconds.
    pub wait_ms_max: f64,
    /// Minimum over all ranks, in milliseconds. Other ranks waited for the slowest rank for the time beyond this.
    pub wait_ms_min: f64,
    /// The rank that waited least, which is the one that all others wait for.
    pub slowest_rank: usize,
}

impl Waiting {
    /// Summarizes how long each rank waited in a step, in the order of ranks.
    ///
    /// # Panics
    /// If there are no ranks.
    #[expect(clippy::cast_precision_loss, reason = "a number of ranks")]
    pub(crate) fn of(step: u64, waited: &[Duration]) -> Self {
        let ms = |waited: &Duration| waited.as_secs_f64() * 1e3;
        let slowest = waited.iter().enumerate().min_by_key(|(_, waited)| **waited);
        let (slowest_rank, min_wait) = slowest.expect("a world has ranks");
        Self {
            wait_step: step,
            wait_ms: waited.iter().map(ms).sum::<f64>() / waited.len() as f64,
            wait_ms_max: waited.iter().max().map_or(0.0, ms),
            wait_ms_min: ms(min_wait),
            slowest_rank,
        }
    }
}

/// The processes of a run, and how they are connected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ProcessTable {
    /// The transport between ranks.
    pub transport: String,
    /// The processes, in the order of their ranks.
    pub processes: Vec<ProcessInfo>,
}

/// A process of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ProcessInfo {
    /// Name of the host.
    pub host: String,
    /// Process id on that host.
    pub pid: u32,
    /// The device of its ranks, as named in run files.
    pub device: String,
    /// CPU model; bitwise reproducibility is only promised on one model.
    pub cpu: String,
    /// The first of its ranks, which are consecutive.
    pub first_rank: usize,
    /// Number of its ranks.
    pub ranks: usize,
}

impl ProcessTable {
    /// Describes a run whose ranks are threads of this process.
    pub(crate) fn alone(device: &str, ranks: usize) -> Self {
        let (host, pid, cpu) = (cluster::host(), std::process::id(), cluster::cpu_model());
        let this = ProcessInfo { host, pid, device: device.to_owned(), cpu, first_rank: 0, ranks };
        Self { transport: "threads".to_owned(), processes: vec![this] }
    }
}

/// Model FLOP/s utilization (MFU), by two conventions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Utilization {
    /// With 6N + 12·L·d·T FLOPs per token (`PaLM`, appendix B).
    pub mfu: f64,
    /// With 6N FLOPs per token: the formula of the XLA FSDP reports.
    pub mfu_6n: f64,
}

/// The quantities that determine the FLOPs per token.
///
/// Per token, the forward pass multiplies and adds once with each of the N parameters (2N FLOPs) and the backward pass
/// twice (4N), which gives 6N; for frozen parameters, which have no gradient, the backward pass does so only once.
/// Attention adds scores and weighted values, each 2·d·T FLOPs per layer and token, three times (forward, and twice in
/// backward): 12·L·d·T, not halved for causality. Recomputation does not count.
///
/// This convention makes runs of different trainers comparable. It is not the work that is executed, which is the
/// [`Cost`](fsdp_nn::op::Cost) of each call, and it cannot be expressed as a sum of these costs: it multiplies with
/// every parameter, although embedding tables, norms and biases are in no matrix product; it does not halve attention
/// for causality, although calls skip masked elements; and backward calls recompute values that were not kept, such as
/// attention's probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlopModel {
    /// N: number of parameters used per token, counting tied ones once; in a mixture of experts, only those of the
    /// experts that the token is sent to.
    pub parameter_count: u64,
    /// Number of these parameters that are trained.
    pub trained_count: u64,
    /// L: number of layers.
    pub layer_count: u64,
    /// d: number of heads times head dimension.
    pub attention_width: u64,
    /// T: number of inputs per sample.
    pub seq_len: u64,
}

impl FlopModel {
    /// Returns 6N, or 4N for frozen parameters.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn flops_per_token_6n(&self) -> f64 {
        4.0 * self.parameter_count as f64 + 2.0 * self.trained_count as f64
    }

    /// Returns 6N + 12·L·d·T.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn flops_per_token(&self) -> f64 {
        let attention = self.layer_count as f64 * self.attention_width as f64 * self.seq_len as f64;
        self.flops_per_token_6n() + 12.0 * attention
    }

    /// Returns the utilization of `ranks` ranks with a peak of `peak_tflops` TFLOP/s each that together process
    /// `tokens_per_s`.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn utilization(&self, tokens_per_s: f64, ranks: usize, peak_tflops: f64) -> Utilization {
        let peak_flops_per_s = peak_tflops * 1e12 * ranks as f64;
        Utilization {
            mfu: self.flops_per_token() * tokens_per_s / peak_flops_per_s,
            mfu_6n: self.flops_per_token_6n() * tokens_per_s / peak_flops_per_s,
        }
    }
}
