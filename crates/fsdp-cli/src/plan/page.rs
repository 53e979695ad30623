//! A plan as a self-contained HTML file: a step on its queues, memory over the step, what computation waits for, more
//! nodes.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use fsdp_core::Queue;
use fsdp_core::memory::Category;
use fsdp_nn::model::unsharded::BlockCall;

use super::ahead::{Forecaster, RunForecast};
use super::cost::span;
use super::{Outlook, text};
use crate::error::CliError;
use crate::report::bars::{self, Bar};
use crate::report::chart::{Chart, Series};
use crate::report::page::{Page, escaped};
use crate::report::plan::{COLORED, LANE, LEFT, OPS_MAX, WIDTH, color, lane, title};
use crate::report::{draw, expect_replaceable};

/// Rows in the timeline of a step.
const ROWS: usize = 6;

/// Minimum visible width of a bar, in pixels.
const SHORTEST: f64 = 0.3;

/// Maximum number of causes of waiting that are drawn.
const WAITS: usize = 12;

/// Units of memory and time for charts: name, size, and the minimum number of it; the first whose minimum is reached is
/// used.
const MEMORY: [(&str, f64, f64); 2] =
    [("GiB", (1_u64 << 30) as f64, 1.0), ("MiB", (1_u64 << 20) as f64, 0.0)];
const TIME: [(&str, f64, f64); 3] =
    [("seconds", 1.0, 5.0), ("milliseconds", 1e-3, 5.0), ("microseconds", 1e-6, 0.0)];

/// Writes the report.
///
/// # Errors
/// [`CliError`]: the file cannot be written, or has contents other than a report.
pub(super) fn write(foresight: &Forecaster<'_>, outlook: &Outlook<'_>, file: &Path) -> Result<(), CliError> {
    let Outlook { ahead, effects, .. } = outlook;
    expect_replaceable("--report", file)?;
    let mut page = Page::default();
    for (title, rows) in text::tables(outlook) {
        page.section(title);
        page.table(&["", ""], rows.into_iter().map(|[name, value]| (false, vec![name, value])));
    }
    page.section("One step");
    timeline(&mut page, ahead);
    page.html("<div class=\"charts\">");
    draw(&mut page, &memory(ahead));
    waits(&mut page, ahead);
    draw(&mut page, &scaling(foresight, ahead));
    page.html("</div>");
    page.section("Other settings");
    let rows = text::effect_rows(ahead, effects).into_iter();
    page.table(&["change", "step", "memory", ""], rows.map(|row| (false, row.to_vec())));
    page.section("Assumed");
    text::assumptions(ahead).iter().for_each(|one| page.text(one));
    page.section("Where other numbers are from");
    let rows = text::sources(ahead).into_iter();
    page.table(&["number", "value", "source"], rows.map(|row| (false, row.to_vec())));
    let heading = format!("{} on {}", ahead.config.model.path, ahead.cluster.name);
    fs::write(file, page.finish(&heading)).map_err(CliError::write(file))
}

/// Draws operations on their queues over time; of a long step only the first ones.
fn timeline(page: &mut Page, ahead: &RunForecast<'_>) {
    let ops = &ahead.plan.step.ops;
    let shown = ops.len().min(OPS_MAX);
    let spans = &ahead.forecast.timeline.spans[..shown];
    let end = spans.iter().map(|span| span.end).fold(0.0, f64::max);
    let what =
        if shown < ops.len() { format!("the first {} of it", span(end)) } else { "all of it".to_owned() };
    page.html(&format!("<figure><h3>{}</h3>", escaped(&what)));
    for row in 0..ROWS {
        let from = end * row as f64 / ROWS as f64;
        page.html(&lanes(ahead, shown, [from, from + end / ROWS as f64]));
    }
    page.legend((0..COLORED.len()).map(|color| (COLORED[color], color, "")));
    page.html("</figure>");
}

/// Draws the operations between two times.
fn lanes(ahead: &RunForecast<'_>, shown: usize, [from, to]: [f64; 2]) -> String {
    let plan = &ahead.plan;
    let queues: Vec<usize> = (0..Queue::ALL.len())
        .filter(|&queue| plan.step.ops.iter().any(|op| lane(&op.kind) == queue))
        .collect();
    let height = queues.len() as f64 * LANE + 18.0;
    let mut svg =
        format!("<svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"Operations by time\">");
    for (at, &queue) in queues.iter().enumerate() {
        let _ = write!(
            svg,
            "<text x=\"0\" y=\"{:.0}\">{}</text>",
            at as f64 * LANE + 13.0,
            Queue::ALL[queue].name()
        );
    }
    let pixel = |time: f64| LEFT + (time - from) / (to - from) * (WIDTH - LEFT);
    for (op, ran) in plan.step.ops[..shown].iter().zip(&ahead.forecast.timeline.spans) {
        let (x, end) = (pixel(ran.start.max(from)), pixel(ran.end.min(to)));
        if end - x < SHORTEST {
            continue;
        }
        let queue = lane(&op.kind);
        let at = queues.iter().position(|&other| other == queue).unwrap_or_default();
        let _ = write!(
            svg,
            "<rect class=\"c{}\" x=\"{x:.1}\" y=\"{:.0}\" width=\"{:.1}\" height=\"{:.0}\"><title>{}, {}</title></rect>",
            color(&op.kind, queue),
            at as f64 * LANE + 2.0,
            end - x,
            LANE - 4.0,
            escaped(&title(plan, &op.kind)),
            span(ran.end - ran.start)
        );
    }
    let _ = write!(svg, "<text x=\"{LEFT}\" y=\"{:.0}\">{}</text></svg>", height - 4.0, span(from));
    svg
}

/// The memory of a device over time: what the step declares, and what calls within blocks hold in addition.
fn memory(ahead: &RunForecast<'_>) -> Chart {
    let usage = &ahead.usage.device;
    let declared: usize = Category::ALL
        .iter()
        .filter(|category| !matches!(category, Category::Activation | Category::Workspace))
        .map(|&category| usage.live_bytes[category as usize])
        .sum();
    let data = ahead.held.data_bytes * ahead.plan.step.rounds;
    let mut calls = ahead.held.calls.iter().cycle();
    let (mut live, mut points) = (data, vec![(0.0, declared + data)]);
    for (op, ran) in ahead.plan.step.ops.iter().zip(&ahead.forecast.timeline.spans) {
        let Some(call) = BlockCall::of(op.kind).and_then(|_| calls.next()) else { continue };
        points.push((ran.start, declared + live + call.total_peak));
        live = call.after(live);
        points.push((ran.end, declared + live));
    }
    let end = ahead.forecast.timeline.end;
    points.push((end, declared + data));
    let (across, second) = unit(&TIME, end);
    let (unit, byte) = unit(&MEMORY, points.iter().map(|point| point.1).max().unwrap_or(0) as f64);
    let points: Vec<(f64, f64)> =
        points.into_iter().map(|(at, bytes)| (at / second, bytes as f64 / byte)).collect();
    Chart {
        title: "Memory of a device over the step".to_owned(),
        unit,
        across,
        may_be_log: false,
        has_zero: false,
        series: vec![Series::of("memory".to_owned(), 0, 0, &points)],
    }
}

/// The unit in which a value is most readable, and the size of one unit.
fn unit(units: &[(&'static str, f64, f64)], value: f64) -> (&'static str, f64) {
    let fits = units.iter().find(|(_, one, least)| value >= one * least);
    let &(name, one, _) = fits.or(units.last()).expect("there are units");
    (name, one)
}

fn waits(page: &mut Page, ahead: &RunForecast<'_>) {
    let waits = text::waits(ahead);
    if waits.is_empty() {
        return;
    }
    let row = |(name, seconds): &(String, f64)| -> (String, Vec<Bar>) {
        (name.clone(), vec![(2, *seconds, span(*seconds))])
    };
    let rows: Vec<(String, Vec<Bar>)> = waits.iter().take(WAITS).map(row).collect();
    let svg = bars::svg("What computation waits for", &rows);
    page.html(&format!("<figure><h3>What computation waits for</h3>{svg}</figure>"));
}

/// The same work per rank on 1, 2, 4, .. nodes, up to the requested number.
fn scaling(foresight: &Forecaster<'_>, ahead: &RunForecast<'_>) -> Chart {
    let per_node = ahead.cluster.devices_per_node();
    let config = &ahead.config;
    let nodes = config.run.ranks.div_ceil(per_node);
    let on = |count: usize| {
        let mut scaled = config.clone();
        scaled.run.ranks = (config.run.ranks / nodes) * count;
        scaled.train.global_batch_size = config.train.global_batch_size / nodes * count;
        scaled.fsdp.mesh.replicate = (config.fsdp.mesh.replicate * count / nodes).max(1);
        let ahead = foresight.ahead(&scaled).ok()?;
        Some((count as f64, ahead.tokens_per_second() / scaled.run.ranks as f64))
    };
    let mut counts: Vec<usize> = (0..).map(|power| 1 << power).take_while(|&count| count < nodes).collect();
    counts.push(nodes);
    let points: Vec<(f64, f64)> = counts.into_iter().filter_map(on).collect();
    Chart {
        title: "The same work for each device, on more nodes".to_owned(),
        unit: "tokens/s of a device",
        across: "nodes",
        may_be_log: false,
        has_zero: true,
        series: vec![Series::of("speed".to_owned(), 0, 0, &points)],
    }
}
