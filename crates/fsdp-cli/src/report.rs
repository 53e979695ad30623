//! `fsdp report`: summarizes runs in a self-contained HTML file.

pub(crate) mod bars;
pub(crate) mod chart;
pub(crate) mod page;
pub(crate) mod plan;
mod record;
mod settings;

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Read};
use std::path::Path;

use crate::args::ReportArgs;
use crate::error::CliError;
use crate::{logging, output};
use bars::Bar;
use chart::{COLORS, Chart, Series};
use page::{Page, escaped};
use plan::Step;
use record::{Evaluations, Record};

/// Maximum ranks listed among those that others waited for.
const RANKS_SHOWN: usize = 16;

/// Charts of step columns: column, title, unit, and whether the axis may be logarithmic.
const CHARTS: [(&str, &str, &str, bool); 9] = [
    ("loss", "Training loss", "cross-entropy", false),
    ("cross_entropy", "Cross-entropy, without what training adds", "cross-entropy", false),
    ("router_loss", "Balancing loss of routers", "part of the loss", false),
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
    let html = render(&runs, steps);
    fs::write(&args.output, html).map_err(CliError::write(&args.output))?;
    output::print(&format!("{}\n", args.output.display()))
}

/// Checks that a file does not exist or is an earlier report.
///
/// # Errors
/// [`CliError::Option`], [`CliError::Create`].
pub(crate) fn expect_replaceable(option: &'static str, path: &Path) -> Result<(), CliError> {
    let mut head = Vec::new();
    let found =
        fs::File::open(path).and_then(|file| file.take(page::HEAD.len() as u64).read_to_end(&mut head));
    match found {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(CliError::Create { option, file: path.to_owned(), source }),
        Ok(_) if head.is_empty() || head == page::HEAD.as_bytes() => Ok(()),
        Ok(_) => {
            let what = format!(
                "{} exists already and is not a report: it would be lost; choose another file",
                path.display()
            );
            Err(CliError::Option { option, what })
        }
    }
}

fn render(runs: &[Record], steps: Vec<Result<Step, CliError>>) -> String {
    let mut page = Page::default();
    overview(&mut page, runs);
    page.section("Training");
    page.html("<div class=\"charts\">");
    CHARTS.iter().for_each(|column| draw(&mut page, &column_chart(runs, *column)));
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
        plan::write_memory(&mut page, &compiled);
        page.html("</div>");
        compiled.iter().for_each(|(run, step)| plan::write_timeline(&mut page, &runs[*run].name, step));
    }
    settings::write(&mut page, runs);
    let title = match runs {
        [run] => run.name.clone(),
        _ => format!("{} runs", runs.len()),
    };
    page.finish(&format!("fsdp: {title}"))
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
    page.table(&["run", "steps", "last loss", "ranks"], runs.iter().map(row));
    for run in runs.iter().filter(|run| run.unread > 0) {
        let lines = if run.unread == 1 { "line" } else { "lines" };
        page.text(&format!("{}: {} {lines} of metrics.jsonl cannot be read.", run.name, run.unread));
    }
}

fn column_chart(
    runs: &[Record],
    (column, title, unit, may_be_log): (&str, &str, &'static str, bool),
) -> Chart {
    let series = runs.iter().enumerate().filter(|(_, run)| !run.column(column).is_empty());
    let series =
        series.map(|(number, run)| Series::of(run.name.clone(), number, number / COLORS, run.column(column)));
    Chart {
        title: title.to_owned(),
        unit,
        across: "step",
        may_be_log,
        has_zero: false,
        series: series.collect(),
    }
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
        Chart { title: title.to_owned(), unit, across: "step", may_be_log, has_zero: false, series }
    };
    page.html("<div class=\"charts\">");
    draw(page, &chart("Evaluation loss", "cross-entropy", false, |found| &found.loss));
    draw(page, &chart("Perplexity", "perplexity", true, |found| &found.perplexity));
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
    draw(
        page,
        &Chart {
            title: "Waiting per step".to_owned(),
            unit: "milliseconds",
            across: "step",
            may_be_log: true,
            has_zero: false,
            series,
        },
    );
    for (number, run) in runs.iter().enumerate().filter(|(_, run)| !run.slowest.is_empty()) {
        let title = format!("{}: steps in which others waited for a rank", run.name);
        let rows = slowest(number, run);
        page.html(&format!("<figure><h3>{}</h3>{}</figure>", escaped(&title), bars::svg(&title, &rows)));
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

/// Draws a chart with its legend. Without finite values it says so; without series it draws nothing.
pub(crate) fn draw(page: &mut Page, chart: &Chart) {
    if chart.series.is_empty() {
        return;
    }
    page.html(&format!("<figure><h3>{}</h3>", escaped(&chart.title)));
    match chart.svg() {
        None => page.text("No value is finite."),
        Some(svg) => page.html(&svg),
    }
    if chart.series.len() > 1 {
        page.legend(chart.series.iter().map(|series| (&*series.name, series.color, chart::dashes(series))));
    }
    page.html("</figure>");
}

fn value(value: f64) -> String {
    if value.is_finite() { format!("{value:.4}") } else { "not finite".to_owned() }
}

#[cfg(test)]
mod tests;
