//! Figures of a plan: a step on its queues, memory over the step, what computation waits for, more nodes.

use fsdp_core::memory::Category;
use fsdp_core::schedule::Op;
use fsdp_sim::virtual_time::Span;

use super::ahead::{Forecaster, RunForecast};
use super::cost::span;
use super::outlook::Outlook;
use super::report;
use crate::document::Document;
use crate::document::bars::{self, Bar};
use crate::document::chart::{Chart, Series};
use crate::document::page::{Page, escaped};
use crate::document::timeline::{self, LEFT, OPS_MAX, WIDTH};

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

/// Draws the figures of a plan.
pub(super) fn draw(outlook: &Outlook<'_>, page: &mut Page) {
    let Outlook { forecaster, run, .. } = outlook;
    page.section("One step");
    timeline(page, run);
    page.html("<div class=\"charts\">");
    memory(run).draw(page);
    waits(page, run);
    scaling(forecaster, run).draw(page);
    page.html("</div>");
}

/// Draws operations on their queues over time; of a long step only the first ones.
fn timeline(page: &mut Page, run: &RunForecast<'_>) {
    let ops = &run.plan.step.ops;
    let shown = ops.len().min(OPS_MAX);
    let spans = &run.forecast.timeline.spans[..shown];
    let end = spans.iter().map(|span| span.end).fold(0.0, f64::max);
    let what =
        if shown < ops.len() { format!("the first {} of it", span(end)) } else { "all of it".to_owned() };
    page.html(&format!("<figure><h3>{}</h3>", escaped(&what)));
    for row in 0..ROWS {
        let from = end * row as f64 / ROWS as f64;
        page.html(&lanes(run, shown, [from, from + end / ROWS as f64]));
    }
    timeline::legend(page, ops.iter().map(|op| op.kind));
    page.html("</figure>");
}

/// Draws the operations between two times.
fn lanes(run: &RunForecast<'_>, shown: usize, [from, to]: [f64; 2]) -> String {
    let ops = &run.plan.step.ops;
    let pixel = |time: f64| LEFT + (time - from) / (to - from) * (WIDTH - LEFT);
    let bar = |(op, ran): (&Op, &Span)| {
        let (x, end) = (pixel(ran.start.max(from)), pixel(ran.end.min(to)));
        (end - x >= SHORTEST).then(|| (op.kind, [x, end - x], format!(", {}", span(ran.end - ran.start))))
    };
    let bars: Vec<_> = ops[..shown].iter().zip(&run.forecast.timeline.spans).filter_map(bar).collect();
    let used = timeline::used(ops.iter().map(|op| op.kind));
    timeline::svg("Operations by time", &run.plan, &bars, &used, &span(from))
}

/// The memory of a device over time: what the step declares, and what calls within blocks hold in addition.
fn memory(run: &RunForecast<'_>) -> Chart {
    let usage = &run.usage.device;
    let declared: usize = Category::ALL
        .iter()
        .filter(|category| !matches!(category, Category::Activation | Category::Workspace))
        .map(|&category| usage.live_bytes[category as usize])
        .sum();
    let data = run.held.data_bytes * run.plan.step.rounds;
    let mut calls = run.held.calls.iter().cycle();
    let (mut live, mut points) = (data, vec![(0.0, declared + data)]);
    for (op, ran) in run.plan.step.ops.iter().zip(&run.forecast.timeline.spans) {
        let Some(call) = op.kind.call().and_then(|_| calls.next()) else { continue };
        points.push((ran.start, declared + live + call.total_peak));
        live = call.after(live);
        points.push((ran.end, declared + live));
    }
    let end = run.forecast.timeline.end;
    points.push((end, declared + data));
    let (across, second) = unit(&TIME, end);
    let (unit, byte) = unit(&MEMORY, points.iter().map(|point| point.1).max().unwrap_or(0) as f64);
    let points: Vec<(f64, f64)> =
        points.into_iter().map(|(at, bytes)| (at / second, bytes as f64 / byte)).collect();
    let series = vec![Series::of("memory".to_owned(), 0, 0, &points)];
    Chart::new("Memory of a device over the step".to_owned(), unit, across, series)
}

/// The unit in which a value is most readable, and the size of one unit.
fn unit(units: &[(&'static str, f64, f64)], value: f64) -> (&'static str, f64) {
    let fits = units.iter().find(|(_, size, min)| value >= size * min);
    let &(name, size, _) = fits.or(units.last()).expect("there are units");
    (name, size)
}

fn waits(page: &mut Page, run: &RunForecast<'_>) {
    let waits = report::waits(run);
    if waits.is_empty() {
        return;
    }
    let row = |(name, seconds): &(String, f64)| -> (String, Vec<Bar>) {
        (name.clone(), vec![(2, *seconds, span(*seconds))])
    };
    let rows: Vec<(String, Vec<Bar>)> = waits.iter().take(WAITS).map(row).collect();
    page.drawing("What computation waits for", &bars::svg("What computation waits for", &rows));
}

/// The same work per rank on 1, 2, 4, .. nodes, up to the requested number.
fn scaling(forecaster: &Forecaster<'_>, run: &RunForecast<'_>) -> Chart {
    let per_node = run.cluster.devices_per_node();
    let config = &run.config;
    let nodes = config.run.ranks.div_ceil(per_node);
    let on = |count: usize| {
        let mut scaled = config.clone();
        scaled.run.ranks = (config.run.ranks / nodes) * count;
        scaled.train.global_batch_size = config.train.global_batch_size / nodes * count;
        scaled.fsdp.mesh.replicate = (config.fsdp.mesh.replicate * count / nodes).max(1);
        let run = forecaster.forecast(&scaled).ok()?;
        Some((count as f64, run.tokens_per_second() / scaled.run.ranks as f64))
    };
    let mut counts: Vec<usize> = (0..).map(|power| 1 << power).take_while(|&count| count < nodes).collect();
    counts.push(nodes);
    let points: Vec<(f64, f64)> = counts.into_iter().filter_map(on).collect();
    let series = vec![Series::of("speed".to_owned(), 0, 0, &points)];
    let title = "The same work for each device, on more nodes".to_owned();
    Chart { has_zero: true, ..Chart::new(title, "tokens/s of a device", "nodes", series) }
}
