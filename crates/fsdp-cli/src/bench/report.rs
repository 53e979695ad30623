//! The results of a benchmark, as text or JSON.

use std::fs;
use std::time::Duration;

use fsdp_core::memory::{Category, Usage};
use fsdp_train::Job;
use serde::Serialize;
use serde_json::{Map, Value};

use super::Measured;
use crate::args::BenchTrainArgs;
use crate::device::host::{threads_per_rank, total_threads};
use crate::document::{self, Document};
use crate::run_setup::Model;
use crate::units::{bytes, params, rate};

/// The figures of a benchmark. Times are those of the first rank.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    parameters: usize,
    ranks: usize,
    processes: usize,
    threads_per_rank: usize,
    micro_batch: usize,
    micro_batches: usize,
    tokens_per_step: usize,
    step_ms_median: f64,
    step_ms: Vec<f64>,
    tokens_per_s: f64,
    /// 6 FLOPs per parameter and token.
    gflops: f64,
    loss_first: f64,
    loss_last: f64,
    /// Of this process (the first, if there are several), all of its ranks together; absent if the system does not
    /// report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    resident_peak_bytes: Option<u64>,
    /// Peaks of the largest rank, as if each rank had its own memory.
    logical_peak_bytes: Map<String, Value>,
}

impl Report {
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
    /// `ranks` are those of this process; `ranks_on_machine` counts the ranks of all processes on this machine.
    pub(super) fn new(
        args: &BenchTrainArgs,
        job: &Job<Model>,
        ranks: &[Measured],
        processes: usize,
        ranks_on_machine: usize,
    ) -> Self {
        let first = &ranks[0];
        let median = median(&first.steps[args.warmup..]).as_secs_f64();
        let tokens = args.global_batch * args.seq;
        let parameters = job.plan.spec.elements();
        let usage: Vec<Usage> = ranks.iter().map(|rank| rank.usage).collect();
        Self {
            parameters,
            ranks: args.ranks(),
            processes,
            threads_per_rank: threads_per_rank(total_threads(args.threads.unwrap_or(0)), ranks_on_machine),
            micro_batch: job.config.train.micro_batch_size,
            micro_batches: job.config.train.micro_batches_per_step(),
            tokens_per_step: tokens,
            step_ms_median: median * 1e3,
            step_ms: first.steps.iter().map(|step| step.as_secs_f64() * 1e3).collect(),
            tokens_per_s: tokens as f64 / median,
            gflops: 6.0 * parameters as f64 * tokens as f64 / median / 1e9,
            loss_first: first.losses[0],
            loss_last: first.losses[first.losses.len() - 1],
            resident_peak_bytes: resident_peak_bytes(),
            logical_peak_bytes: logical_peaks(&usage),
        }
    }
}

impl document::Report for Report {
    fn json(&self) -> Value {
        document::json(self)
    }

    fn write(&self, to: &mut dyn Document) {
        let Self { ranks, threads_per_rank, micro_batch, micro_batches, .. } = self;
        let parameters = params(self.parameters);
        to.line(&format!(
            "{parameters} parameters, {ranks} ranks x {threads_per_rank} threads, {micro_batches} micro-batches of {micro_batch}"
        ));
        to.line(&format!(
            "step {:.1} ms (median of those after the warm-up), {} tokens/s, {:.1} GFLOP/s",
            self.step_ms_median,
            rate(self.tokens_per_s),
            self.gflops
        ));
        to.line(&format!("loss {:.4} first, {:.4} last", self.loss_first, self.loss_last));
        let resident = self.resident_peak_bytes.map_or("unknown".to_owned(), bytes);
        let logical = self.logical_peak_bytes.get(TOTAL).and_then(Value::as_u64).map_or(String::new(), bytes);
        let of = if self.processes == 1 { "all ranks" } else { "process 0" };
        to.line(&format!("resident {resident} ({of}), logical {logical} per rank"));
    }
}

const TOTAL: &str = "all together";

fn logical_peaks(ranks: &[Usage]) -> Map<String, Value> {
    let largest = |property: &dyn Fn(&Usage) -> usize| ranks.iter().map(property).max().unwrap_or(0);
    let mut peaks: Map<String, Value> = Category::ALL
        .into_iter()
        .map(|category| (category.name().to_owned(), largest(&|usage| usage.peak(category)).into()))
        .collect();
    peaks.insert(TOTAL.to_owned(), largest(&|usage| usage.device.total_peak_bytes).into());
    peaks
}

fn median(steps: &[Duration]) -> Duration {
    let mut sorted = steps.to_vec();
    sorted.sort_unstable();
    sorted[sorted.len() / 2]
}

/// Peak resident memory of this process.
fn resident_peak_bytes() -> Option<u64> {
    peak_of_status(&fs::read_to_string("/proc/self/status").ok()?)
}

fn peak_of_status(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_ignores_step_order() {
        let steps = [5, 1, 9].map(Duration::from_millis);
        assert_eq!(median(&steps), Duration::from_millis(5));
    }

    #[test]
    fn peak_memory_is_parsed_from_proc_status() {
        assert_eq!(peak_of_status("VmPeak:\t  9 kB\nVmHWM:\t     1234 kB\n"), Some(1234 * 1024));
        assert_eq!(peak_of_status("VmPeak:\t  9 kB\n"), None);
    }
}
