//! The results, as text or JSON.

use std::time::Duration;

use fsdp_core::Queue;
use fsdp_nn::hf::HfModel;
use fsdp_train::Job;
use fsdp_train::metrics::FlopModel;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::clock::DeviceBytes;
use crate::models::Workload;
use crate::{Args, Measured, cards, name};

/// The figures of a benchmark: times of the first rank, bytes of the largest.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    model: String,
    device: String,
    /// The card's name; absent on the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    device_name: Option<String>,
    ranks: usize,
    parameters: usize,
    tokens_per_step: usize,
    matmul_ceiling_tflops: f64,
    matmul_ceiling_edge: usize,
    copy_ceiling_gb_per_s: f64,
    /// Over the steps after the warm-up: the device is never idle between them, so single steps have no time of their
    /// own.
    step_ms_mean: f64,
    step_ms: Vec<f64>,
    /// Host time to issue a step to an idle device.
    issue_ms_median: f64,
    tokens_per_s: f64,
    /// Model TFLOP/s of one rank: 6N + 12·L·d·T per token.
    tflops: f64,
    /// As a fraction of the measured matmul ceiling, not of a data sheet.
    of_matmul_ceiling: f64,
    /// As a fraction of the given peak, or of the known peak of the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    mfu: Option<f64>,
    /// Observation costs a little.
    observed_step_ms: f64,
    busy_ms: Map<String, Value>,
    exposed_communication_ms: f64,
    loss_first: f64,
    loss_last: f64,
    /// The libtorch attention kernels that ran; absent if there was no choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    attention_kernels: Option<&'static str>,
    /// Bytes counted by the engine; exactly what the ledger predicts.
    counted_peak_bytes: usize,
    /// Absent on the host.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    card: Option<Card>,
}

/// Device memory of the largest rank, in bytes.
#[derive(Clone, Debug, Serialize)]
struct Card {
    /// Peak bytes obtained from the driver by the engine's memory and by libtorch's allocator.
    peak_bytes: u64,
    /// The engine's part: counted bytes, and blocks kept for reuse.
    arena_peak_bytes: u64,
    /// libtorch's part: temporaries of operations, and workspaces.
    libtorch_peak_bytes: u64,
    /// Bytes in use according to the driver, by all processes.
    device_used_bytes: u64,
}

impl Card {
    fn of(device: DeviceBytes) -> Self {
        Self {
            peak_bytes: device.arena_peak + device.libtorch_peak,
            arena_peak_bytes: device.arena_peak,
            libtorch_peak_bytes: device.libtorch_peak,
            device_used_bytes: device.used,
        }
    }

    fn text(&self) -> String {
        format!(
            ", {} allocated by the driver ({} for the engine, {} for libtorch), {} of the device used by all processes",
            mib(self.peak_bytes),
            mib(self.arena_peak_bytes),
            mib(self.libtorch_peak_bytes),
            mib(self.device_used_bytes)
        )
    }
}

impl Report {
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
    pub(crate) fn new(args: &Args, workload: &Workload, job: &Job<HfModel>, ranks: &[Measured]) -> Self {
        let first = &ranks[0];
        let step = mean(&first.steps[args.warmup..]);
        let tokens = workload.batch * workload.seq * args.ranks;
        let parameters = job.plan.spec.elements();
        let flops = flops(workload, parameters).flops_per_token();
        let tokens_per_s = tokens as f64 / step * 1e3;
        let tflops = flops * tokens_per_s / args.ranks as f64 / 1e12;
        let busy =
            Queue::ALL.map(|queue| (queue.name().to_owned(), first.observed.busy_ms[queue as usize].into()));
        let counted = ranks.iter().map(|rank| rank.usage.device.total_peak_bytes).max().unwrap_or(0);
        let device = ranks.iter().filter_map(|rank| rank.device);
        let peak = args.peak_tflops.or_else(|| first.device_name.as_deref().and_then(cards::peak_tflops));
        Self {
            model: name(args.model),
            device: name(args.device),
            device_name: first.device_name.clone(),
            ranks: args.ranks,
            parameters,
            tokens_per_step: tokens,
            matmul_ceiling_tflops: first.ceilings.matmul_tflops,
            matmul_ceiling_edge: first.ceilings.matmul_edge,
            copy_ceiling_gb_per_s: first.ceilings.copy_gb_per_s,
            step_ms_mean: step,
            step_ms: first.steps.iter().map(|step| step.as_secs_f64() * 1e3).collect(),
            issue_ms_median: median(&first.issues),
            tokens_per_s,
            tflops,
            of_matmul_ceiling: tflops / first.ceilings.matmul_tflops,
            mfu: peak.map(|peak| tflops / peak),
            observed_step_ms: first.observed.step_ms,
            busy_ms: busy.into_iter().collect(),
            exposed_communication_ms: first.observed.exposed_ms,
            loss_first: first.losses[0],
            loss_last: first.losses[first.losses.len() - 1],
            attention_kernels: first.attention_kernels,
            counted_peak_bytes: counted,
            card: device.map(Card::of).max_by_key(|card| card.peak_bytes),
        }
    }

    /// One JSON object.
    pub(crate) fn json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("figures have a JSON form");
        text.push('\n');
        text
    }

    /// Lines for people.
    pub(crate) fn text(&self) -> String {
        let busy: Vec<String> = self
            .busy_ms
            .iter()
            .map(|(queue, ms)| format!("{queue} {:.2}", ms.as_f64().unwrap_or_default()))
            .collect();
        format!(
            "{model} on {device}: {parameters} parameters, {ranks} ranks, {tokens} tokens a step\n\
             ceilings: {matmul:.2} TFLOP/s (product of {edge} x {edge}, bf16), {copy:.1} GB/s (copy, read and written)\n\
             step {step:.2} ms, issued in {issue:.2} ms: {rate:.0} tokens/s, {tflops:.2} TFLOP/s a rank, \
             {percent:.1} % of the product's ceiling{mfu}\n\
             busy ms of an observed step of {observed:.2}: {busy}; {exposed:.2} ms of communication not hidden\n\
             loss {first:.4} first, {last:.4} last\n\
             {attention}memory {counted} counted{card}\n",
            attention = self.attention_kernels.map(|name| format!("attention {name}\n")).unwrap_or_default(),
            model = self.model,
            device = self.device_name.as_deref().unwrap_or(&self.device),
            parameters = self.parameters,
            ranks = self.ranks,
            tokens = self.tokens_per_step,
            matmul = self.matmul_ceiling_tflops,
            edge = self.matmul_ceiling_edge,
            copy = self.copy_ceiling_gb_per_s,
            step = self.step_ms_mean,
            issue = self.issue_ms_median,
            rate = self.tokens_per_s,
            tflops = self.tflops,
            percent = 100.0 * self.of_matmul_ceiling,
            mfu = self.mfu.map(|mfu| format!(", MFU {:.1} %", 100.0 * mfu)).unwrap_or_default(),
            observed = self.observed_step_ms,
            busy = busy.join(", "),
            exposed = self.exposed_communication_ms,
            first = self.loss_first,
            last = self.loss_last,
            counted = mib(self.counted_peak_bytes as u64),
            card = self.card.as_ref().map(Card::text).unwrap_or_default(),
        )
    }
}

#[expect(clippy::cast_precision_loss, reason = "bytes of a device are far below 2^53")]
fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

fn flops(workload: &Workload, parameters: usize) -> FlopModel {
    FlopModel {
        parameter_count: parameters as u64,
        trained_count: parameters as u64,
        layer_count: workload.layers as u64,
        attention_width: workload.width as u64,
        seq_len: workload.seq as u64,
    }
}

/// The mean in milliseconds.
fn mean(times: &[Duration]) -> f64 {
    times.iter().sum::<Duration>().as_secs_f64() * 1e3 / times.len() as f64
}

/// The median in milliseconds.
fn median(times: &[Duration]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted[sorted.len() / 2].as_secs_f64() * 1e3
}
