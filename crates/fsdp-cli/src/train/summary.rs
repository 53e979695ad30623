//! What a finished run is summed up to.

use std::fmt::Write;
use std::io;

use fsdp_core::comm::Traffic;
use fsdp_core::memory::{Category, Usage};
use fsdp_train::Job;
use fsdp_train::train::Summary;

use crate::output::{Paint, table};
use crate::units::{bytes, clock, params, rate};

/// The text of a summary.
pub(super) fn render<A>(job: &Job<A>, summary: &Summary) -> String {
    let plan = &job.plan;
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<14}{value}");
    };
    let stopped = if summary.stopped {
        format!(" of {}, stopped early", job.config.train.steps)
    } else {
        String::new()
    };
    let resumed = match summary.resumed_from {
        Some(before) => format!(", of which {} after a checkpoint", summary.steps - before),
        None => String::new(),
    };
    line("steps", format!("{}{stopped}{resumed}, in {}", summary.steps, clock(summary.elapsed)));
    if summary.resumed_from != Some(summary.steps) {
        line("loss", format!("{:.4} first, {:.4} last", summary.first_loss, summary.last_loss));
    }
    if let Some(evaluation) = &summary.evaluation {
        line("evaluation", format!("loss {:.4} over {} tokens", evaluation.loss, evaluation.targets));
    }
    line("speed", format!("{} tokens/s (median)", rate(summary.tokens_per_s)));
    let (count, units) = (params(plan.spec.elements()), plan.layout.units.len());
    line("model", format!("{count} parameters in {units} units, mesh {}", plan.mesh));
    let heading = Paint::of(&io::stdout()).heading("memory and communication per rank (the largest)");
    let _ = write!(text, "\n{heading}\n{}", table(["category", "peak"], memory_rows(&summary.usage)));
    let _ = write!(text, "{}", table(["collective", "calls", "sent"], traffic_rows(&summary.traffic)));
    let _ = writeln!(text, "\nmodel in {}", summary.model.display());
    text
}

/// Peaks of the rank with the largest one, category by category.
pub(crate) fn memory_rows(ranks: &[Usage]) -> Vec<[String; 2]> {
    let peak = |of: &dyn Fn(&Usage) -> usize| bytes(ranks.iter().map(of).max().unwrap_or(0) as u64);
    let used = |category: &Category| ranks.iter().any(|usage| usage.peak(*category) > 0);
    let mut rows: Vec<[String; 2]> = Category::ALL
        .into_iter()
        .filter(used)
        .map(|category| [category.name().to_owned(), peak(&|usage| usage.peak(category))])
        .collect();
    rows.push(["all together".to_owned(), peak(&|usage| usage.total_peak_bytes)]);
    rows
}

fn traffic_rows(ranks: &[Traffic]) -> Vec<[String; 3]> {
    let largest = ranks.iter().max_by_key(|traffic| traffic.bytes()).copied().unwrap_or_default();
    let row = |name: &str, calls: u64, sent: u64| [name.to_owned(), calls.to_string(), bytes(sent)];
    vec![
        row("all-gather", largest.all_gathers, largest.all_gather_bytes),
        row("reduce-scatter", largest.reduce_scatters, largest.reduce_scatter_bytes),
        row("all-reduce", largest.all_reduces, largest.all_reduce_bytes),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_shows_the_largest_rank_and_leaves_out_what_is_unused() {
        let usage = |bytes| {
            let mut usage = Usage { total_peak_bytes: bytes, ..Usage::default() };
            usage.peak_bytes[Category::Activation as usize] = bytes;
            usage
        };
        let rows = memory_rows(&[usage(1024), usage(2048)]);
        assert_eq!(
            rows,
            [["activations", "2.0 KiB"], ["all together", "2.0 KiB"]].map(|row| row.map(String::from))
        );
    }
}
