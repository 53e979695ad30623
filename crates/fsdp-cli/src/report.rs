//! `fsdp report`: summarizes runs in a self-contained HTML file.

mod record;
mod settings;
mod step;

use std::collections::BTreeSet;

use crate::args::ReportArgs;
use crate::document::Document;
use crate::document::bars::{self, Bar};
use crate::document::chart::{COLORS, Chart, Series};
use crate::document::page::{Page, expect_replaceable};
use crate::error::CliError;
use crate::units::counted;
use crate::{logging, output};
use record::{Evaluations, Record};
use step::Step;

/// Maximum ranks listed among those that others waited for.
const RANKS_SHOWN: usize = 16;

/// Charts of step columns: column, title, unit, and whether the axis may be logarithmic.
const CHARTS: [(&str, &str, &str, bool); 11] = [
    ("loss", "Training loss", "cross-entropy", false),
    ("cross_entropy", "Cross-entropy, without what training adds", "cross-entropy", false),
    ("router_loss", "Balancing loss of routers", "part of the loss", false),
    ("router_z_loss", "z-loss of routers", "part of the loss", false),
    ("router_sequence_loss", "Sequence-wise balance loss of routers", "part of the loss", false),
    ("z_loss", "z-loss", "part of the loss", false),
    ("expert_imbalance", "Imbalance of experts", "largest load / mean, in the worst layer", false),
    ("lr", "Learning rate", "learning rate", true),
    ("grad_norm", "Gradient norm", "L2 norm", true),
    ("tokens_per_s", "Speed", "tokens/s", false),
    ("mfu", "Model FLOP/s utilization", "fraction of the peak", false),
];

/// Reads runs and writes the report.
///
/// # Errors
/// [`CliError`]: a folder has no run, or the file cannot be written.
pub(crate) fn run(args: &ReportArgs) -> Result<(), CliError> {
    logging::install(None)?;
    expect_replaceable("--output", &args.output)?;
    let runs = args.runs.iter().map(|folder| Record::read(folder)).collect::<Result<Vec<_>, _>>()?;
    let steps: Vec<Result<Step, CliError>> = args.runs.iter().map(|folder| Step::read(folder)).collect();
    let title = match &runs[..] {
        [run] => run.name.clone(),
        _ => format!("{} runs", runs.len()),
    };
    render(&runs, steps).write(&format!("fsdp: {title}"), &args.output)?;
    output::print(&format!("{}\n", args.output.display()))
}

fn render(runs: &[Record], steps: Vec<Result<Step, CliError>>) -> Page {
    let mut page = Page::default();
    overview(&mut page, runs);
    page.section("Training");
    page.html("<div class=\"charts\">");
    CHARTS.iter().for_each(|column| column_chart(runs, *column).draw(&mut page));
    page.html("</div>");
    page.section("Evaluation");
    evaluation(&mut page, runs);
    page.section("Waiting of ranks for each other");
    waiting(&mut page, runs);
    page.section("Memory and schedule");
    let mut compiled = Vec::new();
    for (run, (record, step)) in runs.iter().zip(steps).enumerate() {
        match step {
            Ok(step) => compiled.push((run, step)),
            Err(error) => page.text(&format!("{}: neither is available: {error}", record.name)),
        }
    }
    if !compiled.is_empty() {
        page.html("<div class=\"charts\">");
        step::write_memory(&mut page, &compiled);
        page.html("</div>");
        compiled.iter().for_each(|(run, step)| step::write_timeline(&mut page, &runs[*run].name, step));
    }
    settings::write(&mut page, runs);
    page
}

/// A table of runs, with the color of each.
fn overview(page: &mut Page, runs: &[Record]) {
    page.legend(runs.iter().enumerate().map(|(number, run)| (&*run.name, number % COLORS, "")));
    let row = |run: &Record| {
        let planned = run.planned();
        let of = planned.map_or(String::new(), |planned| format!(" of {planned}"));
        let state =
            if planned.is_some_and(|planned| run.steps < planned) { " (running, or stopped)" } else { "" };
        let last = run.column("loss").last().map_or("–".to_owned(), |point| value(point.1));
        let who = run.start.as_ref().map_or("–".to_owned(), |start| {
            format!("{} over {}, fsdp {}", start.ranks, start.transport, start.version)
        });
        (false, vec![run.name.clone(), format!("{}{of}{state}", run.steps), last, who])
    };
    page.rows(&["run", "steps", "last loss", "ranks"], runs.iter().map(row));
    for run in runs.iter().filter(|run| run.unread > 0) {
        let lines = counted(run.unread, "line");
        page.text(&format!("{}: {lines} of metrics.jsonl cannot be read.", run.name));
    }
}

fn column_chart(
    runs: &[Record],
    (column, title, unit, may_be_log): (&str, &str, &'static str, bool),
) -> Chart {
    let series = runs.iter().enumerate().filter(|(_, run)| !run.column(column).is_empty());
    let series =
        series.map(|(number, run)| Series::of(run.name.clone(), number, number / COLORS, run.column(column)));
    Chart { may_be_log, ..Chart::new(title.to_owned(), unit, "step", series.collect()) }
}

/// One series per run and evaluation set: colors distinguish runs, dashes distinguish sets.
fn evaluation(page: &mut Page, runs: &[Record]) {
    let sets: BTreeSet<&String> = runs.iter().flat_map(|run| run.evaluations.keys()).collect();
    if sets.is_empty() {
        return page.text("No run was evaluated (data.eval).");
    }
    let chart = |title: &str, unit, may_be_log, points: fn(&Evaluations) -> &[(f64, f64)]| {
        let of_run = |(number, run): (usize, &Record)| {
            let of_set = |(dash, set): (usize, &&String)| {
                let name = if runs.len() > 1 { format!("{set}, {}", run.name) } else { (*set).clone() };
                run.evaluations.get(*set).map(|found| Series::of(name, number, dash, points(found)))
            };
            sets.iter().enumerate().filter_map(of_set).collect::<Vec<_>>()
        };
        let series = runs.iter().enumerate().flat_map(of_run).collect();
        Chart { may_be_log, ..Chart::new(title.to_owned(), unit, "step", series) }
    };
    page.html("<div class=\"charts\">");
    chart("Evaluation loss", "cross-entropy", false, |found| &found.loss).draw(page);
    chart("Perplexity", "perplexity", true, |found| &found.perplexity).draw(page);
    page.html("</div>");
}

fn waiting(page: &mut Page, runs: &[Record]) {
    if runs.iter().all(|run| run.column("wait_ms").is_empty()) {
        return page.text(
            "No run recorded how long ranks wait: each has one rank, or a device that runs asynchronously.",
        );
    }
    page.html("<div class=\"charts\">");
    let name = |run: &Record, what: &str| {
        if runs.len() > 1 { format!("{what}, {}", run.name) } else { what.to_owned() }
    };
    let columns = [("wait_ms_max", "longest"), ("wait_ms", "mean"), ("wait_ms_min", "shortest")];
    let of_run = |(number, run): (usize, &Record)| {
        let series = columns.iter().enumerate().filter(|(_, (column, _))| !run.column(column).is_empty());
        let of = |(dash, (column, what)): (usize, &(&str, &str))| {
            Series::of(name(run, what), number, dash, run.column(column))
        };
        series.map(of).collect::<Vec<_>>()
    };
    let series = runs.iter().enumerate().flat_map(of_run).collect();
    let chart = Chart::new("Waiting per step".to_owned(), "milliseconds", "step", series);
    Chart { may_be_log: true, ..chart }.draw(page);
    for (number, run) in runs.iter().enumerate().filter(|(_, run)| !run.slowest.is_empty()) {
        let title = format!("{}: steps in which others waited for a rank", run.name);
        let rows = slowest(number, run);
        page.drawing(&title, &bars::svg(&title, &rows));
    }
    page.html("</div>");
}

/// The ranks that others waited for most often.
#[expect(clippy::cast_precision_loss, reason = "the length of a bar")]
fn slowest(number: usize, run: &Record) -> Vec<(String, Vec<Bar>)> {
    let mut ranks: Vec<(u64, u64)> = run.slowest.iter().map(|(&rank, &steps)| (rank, steps)).collect();
    ranks.sort_by_key(|&(rank, steps)| (std::cmp::Reverse(steps), rank));
    ranks.truncate(RANKS_SHOWN);
    let bar = |steps: u64| vec![(number % COLORS, steps as f64, steps.to_string())];
    ranks.into_iter().map(|(rank, steps)| (format!("rank {rank}"), bar(steps))).collect()
}

fn value(value: f64) -> String {
    if value.is_finite() { format!("{value:.4}") } else { "not finite".to_owned() }
}

#[cfg(test)]
mod tests;
