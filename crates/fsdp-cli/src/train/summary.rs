//! The summary of a finished run.

use fsdp_config::WatchedLoss;
use fsdp_core::comm::Traffic;
use fsdp_core::memory::{Bytes, Category, Usage};
use fsdp_core::model::{ModelSpec, ParamSpec};
use fsdp_core::plan::Plan;
use fsdp_train::train::Summary;
use fsdp_train::{Evaluation, Job};

use crate::document::Document;
use crate::units::{bytes, clock, params, perplexity, rate, speed_unit};

/// Writes a summary.
pub(super) fn write<A>(job: &Job<A>, summary: &Summary, to: &mut dyn Document) {
    let plan = &job.plan;
    let steps = job.config.train.steps;
    let stopped = match &summary.early {
        Some(WatchedLoss { step, loss }) => {
            format!(" of {steps}: evaluations give no lower loss than {loss:.4}, after step {step}")
        }
        None if summary.stopped => format!(" of {steps}, stopped early"),
        None => String::new(),
    };
    let resumed = match summary.resumed_from {
        Some(before) => format!(", of which {} after a checkpoint", summary.steps - before),
        None => String::new(),
    };
    to.pair("steps", format!("{}{stopped}{resumed}, in {}", summary.steps, clock(summary.elapsed)));
    if summary.resumed_from != Some(summary.steps) {
        to.pair("loss", format!("{:.4} first, {:.4} last", summary.first_loss, summary.last_loss));
    }
    if summary.skipped > 0 {
        to.pair("skipped", format!("{} steps, whose gradients overflowed in f16", summary.skipped));
    }
    if let Some((WatchedLoss { step, loss }, checkpoint)) = &summary.best {
        to.pair("best", format!("loss {loss:.4} after step {step}, in {}", checkpoint.display()));
    }
    let (speed, unit) = (rate(summary.tokens_per_s), speed_unit(job.config.data.packing));
    to.pair("speed", format!("{speed} {unit} (median)"));
    to.pair("model", units_of(plan));
    if !summary.evaluations.is_empty() {
        to.section("last evaluation");
        to.table(EVALUATION_HEADER, summary.evaluations.iter().map(evaluation_row));
    }
    to.section("memory and communication per rank (the largest)");
    to.table(["category", "peak"], memory_rows(&summary.usage));
    to.table(["collective", "calls", "sent"], traffic_rows(&summary.traffic));
    let what = if summary.model.ends_with("adapter") { "adapter" } else { "model" };
    to.gap();
    to.line(&format!("{what} in {}", summary.model.display()));
}

/// The model, its units and its mesh.
pub(crate) fn units_of(plan: &Plan) -> String {
    format!("{} in {} units, mesh {}", parameters(&plan.spec), plan.layout.units.len(), plan.mesh)
}

/// The step of a plan in a line.
pub(crate) fn step_of(plan: &Plan) -> String {
    format!("{}, {} micro-batches per rank and step", units_of(plan), plan.step.rounds)
}

/// Number of parameters, and of trained ones if some are frozen.
pub(crate) fn parameters(spec: &ModelSpec) -> String {
    let all = spec.elements();
    let trained: usize = spec.params.iter().filter(|param| param.trainable).map(ParamSpec::len).sum();
    let frozen = if trained < all { format!(" ({} trained)", params(trained)) } else { String::new() };
    format!("{} parameters{frozen}", params(all))
}

/// The header of the table of evaluations.
pub(crate) const EVALUATION_HEADER: [&str; 4] = ["set", "loss", "perplexity", "tokens"];

/// A row in the table of evaluations.
pub(crate) fn evaluation_row(evaluation: &Evaluation) -> [String; 4] {
    let Evaluation { set, loss, targets } = evaluation;
    [set.clone(), format!("{loss:.4}"), perplexity(evaluation.perplexity()), targets.to_string()]
}

/// Peak memory of the rank with the largest peak, by category: on the device, and on the host if it holds anything
/// separately.
pub(crate) fn memory_rows(ranks: &[Usage]) -> Vec<[String; 2]> {
    let mut rows = rows_of(ranks, "", |usage| &usage.device);
    if ranks.iter().any(|usage| usage.host.total_peak_bytes > 0) {
        rows.extend(rows_of(ranks, "on the host: ", |usage| &usage.host));
    }
    rows
}

fn rows_of(ranks: &[Usage], place: &str, of: fn(&Usage) -> &Bytes) -> Vec<[String; 2]> {
    let largest =
        |what: &dyn Fn(&Bytes) -> usize| ranks.iter().map(|usage| what(of(usage))).max().unwrap_or(0);
    let row = |name: &str, peak: usize| [format!("{place}{name}"), bytes(peak as u64)];
    let peaks = Category::ALL.map(|category| (category, largest(&|bytes| bytes.peak(category))));
    let used = peaks.into_iter().filter(|(_, peak)| *peak > 0);
    let total = row("all together", largest(&|bytes| bytes.total_peak_bytes));
    used.map(|(category, peak)| row(category.name(), peak)).chain([total]).collect()
}

fn traffic_rows(ranks: &[Traffic]) -> Vec<[String; 3]> {
    let largest = ranks.iter().max_by_key(|traffic| traffic.bytes()).copied().unwrap_or_default();
    let row = |name: &str, calls: u64, sent: u64| [name.to_owned(), calls.to_string(), bytes(sent)];
    let mut rows = vec![
        row("all-gather", largest.all_gathers, largest.all_gather_bytes),
        row("reduce-scatter", largest.reduce_scatters, largest.reduce_scatter_bytes),
        row("all-reduce", largest.all_reduces, largest.all_reduce_bytes),
    ];
    // Only activations are redistributed, on a context axis or a large expert axis.
    if largest.all_to_alls > 0 {
        rows.push(row("all-to-all", largest.all_to_alls, largest.all_to_all_bytes));
    }
    // Only values read from files are broadcast, and only to replicas.
    if largest.broadcasts > 0 {
        rows.push(row("broadcast", largest.broadcasts, largest.broadcast_bytes));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_rows_show_largest_rank_and_omit_unused() {
        let usage = |bytes| {
            let mut usage = Usage::default();
            usage.device.total_peak_bytes = bytes;
            usage.device.peak_bytes[Category::Activation as usize] = bytes;
            usage
        };
        let rows = memory_rows(&[usage(1024), usage(2048)]);
        assert_eq!(
            rows,
            [["activations", "2.0 KiB"], ["all together", "2.0 KiB"]].map(|row| row.map(String::from))
        );
        let mut offloaded = usage(1024);
        offloaded.host.add(Category::OptimizerState, 4096);
        let on_host = [["on the host: optimizer state", "4.0 KiB"], ["on the host: all together", "4.0 KiB"]];
        assert_eq!(memory_rows(&[usage(1024), offloaded])[2..], on_host.map(|row| row.map(String::from)));
    }
}
