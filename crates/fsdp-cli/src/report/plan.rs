//! Draws the step of a run's configuration: predicted memory, and the schedule's operations on their queues.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

use fsdp_core::memory::{Category, Usage};
use fsdp_core::plan::Plan;
use fsdp_core::program::{BlockCall, ForwardMode};
use fsdp_core::schedule::OpKind;
use fsdp_core::{Queue, Rank};
use fsdp_nn::HostMemory;
use fsdp_nn::model::Architecture;
use fsdp_train::{plan, predict};

use super::bars::{Bar, svg};
use super::page::{Page, escaped};
use fsdp_config::World;

use crate::args::RunFileArgs;
use crate::error::CliError;
use crate::run_setup::RunSetup;
use crate::units::bytes;

/// Maximum operations drawn; more would make the page slow.
pub(crate) const OPS_MAX: usize = 4000;

/// Operations per row of the timeline.
const OPS_PER_ROW: usize = 160;

pub(crate) const WIDTH: f64 = 1300.0;
pub(crate) const LEFT: f64 = 70.0;
pub(crate) const LANE: f64 = 18.0;

/// The step of a run, recompiled from its resolved configuration.
pub(super) struct Step {
    plan: Plan,
    /// Peak memory of the first rank.
    usage: Usage,
}

impl Step {
    /// Compiles the step of a run from `resolved.toml` in its output folder.
    ///
    /// # Errors
    /// [`CliError`]: the configuration is of another version, or its model no longer exists.
    pub(super) fn read(folder: &Path) -> Result<Self, CliError> {
        let file = RunFileArgs { file: folder.join("resolved.toml"), overrides: Vec::new() };
        let (setup, _) = RunSetup::read(&file, &|_| World::of_ranks(1))?;
        let (config, architecture) = (&setup.config, setup.build()?);
        let plan = plan(config, &architecture.description().spec, false)?;
        let usage = predict::<HostMemory, _>(config, &architecture, &plan, Rank(0))?;
        Ok(Self { plan, usage })
    }
}

/// Writes the predicted memory of runs by category.
pub(super) fn write_memory(page: &mut Page, steps: &[(usize, Step)]) {
    let of = |usage: &Usage, category: Category| usage.device.peak(category) + usage.host.peak(category);
    let bars = |what: &dyn Fn(&Usage) -> usize| -> Vec<Bar> {
        steps.iter().map(|(run, step)| bar(*run, what(&step.usage))).collect()
    };
    let used = |category: &Category| steps.iter().any(|(_, step)| of(&step.usage, *category) > 0);
    let categories = Category::ALL.into_iter().filter(used);
    let mut rows: Vec<(String, Vec<Bar>)> =
        categories.map(|category| (category.name().to_owned(), bars(&|usage| of(usage, category)))).collect();
    rows.push((
        "all together".to_owned(),
        bars(&|usage| usage.device.total_peak_bytes + usage.host.total_peak_bytes),
    ));
    page.html(&format!(
        "<figure><h3>Memory of rank 0, predicted peaks</h3>{}",
        svg("Memory by category", &rows)
    ));
    page.html("<p class=\"note\">Categories have their peaks at different times, so these do not add up.</p></figure>");
}

#[expect(clippy::cast_precision_loss, reason = "the length of a bar")]
fn bar(run: usize, count: usize) -> Bar {
    (run % super::chart::COLORS, count as f64, bytes(count as u64))
}

/// Writes the operations of the step on their queues.
pub(super) fn write_timeline(page: &mut Page, name: &str, step: &Step) {
    let plan = &step.plan;
    let places = places(plan);
    let shown = places.len().min(OPS_MAX);
    let all =
        if shown < places.len() { format!(", the first {shown} of {}", places.len()) } else { String::new() };
    page.html(&format!("<figure><h3>{}: a training step{all}</h3>", escaped(name)));
    let columns = places[..shown].iter().map(|&place| place + 1).max().unwrap_or(0);
    for first in (0..columns).step_by(OPS_PER_ROW) {
        page.html(&row(plan, &places[..shown], first));
    }
    let ops = &plan.step.ops[..shown];
    let colors: BTreeSet<usize> = ops.iter().map(|op| color(&op.kind, lane(&op.kind))).collect();
    page.legend(colors.into_iter().map(|color| (COLORED[color], color, "")));
    page.html(
        "<p class=\"note\">An operation is placed after those that it waits for. Its length is one slot, not a time; \
         fsdp train --trace writes times.</p></figure>",
    );
}

/// The column of each operation: after the previous one on its queue, and after all that it waits for.
fn places(plan: &Plan) -> Vec<usize> {
    let mut free = [0; Queue::ALL.len()];
    let mut places: Vec<usize> = Vec::with_capacity(plan.step.ops.len());
    for op in &plan.step.ops {
        let lane = lane(&op.kind);
        let waited = op.waits.iter().chain(&op.joins).map(|&id| places[id.0] + 1).max().unwrap_or(0);
        let place = waited.max(free[lane]);
        free[lane] = place + 1;
        places.push(place);
    }
    places
}

pub(crate) fn lane(kind: &OpKind) -> usize {
    let queue = kind.queue();
    Queue::ALL.iter().position(|&other| other == queue).expect("all queues are listed")
}

/// One row of the timeline, starting at a column.
#[expect(clippy::cast_precision_loss, reason = "pixels")]
fn row(plan: &Plan, places: &[usize], first: usize) -> String {
    let ops =
        || plan.step.ops.iter().zip(places).filter(|(_, place)| (first..first + OPS_PER_ROW).contains(place));
    let used: Vec<usize> =
        (0..Queue::ALL.len()).filter(|&queue| ops().any(|(op, _)| lane(&op.kind) == queue)).collect();
    let height = used.len() as f64 * LANE + 6.0;
    let mut text =
        format!("<svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"Operations by queue\">");
    for (at, &queue) in used.iter().enumerate() {
        let y = at as f64 * LANE + 13.0;
        let _ = write!(text, "<text x=\"0\" y=\"{y:.0}\">{}</text>", Queue::ALL[queue].name());
    }
    let width = (WIDTH - LEFT) / OPS_PER_ROW as f64;
    for (op, &place) in ops() {
        let queue = lane(&op.kind);
        let at = used.iter().position(|&other| other == queue).unwrap_or_default();
        let (x, y) = (LEFT + (place - first) as f64 * width, at as f64 * LANE + 2.0);
        let _ = write!(
            text,
            "<rect class=\"c{}\" x=\"{x:.1}\" y=\"{y:.0}\" width=\"{:.1}\" height=\"{:.0}\"><title>{}</title></rect>",
            color(&op.kind, queue),
            width - 1.0,
            LANE - 4.0,
            escaped(&title(plan, &op.kind))
        );
    }
    text + "</svg>"
}

/// The categories with their own color, in the order of colors.
pub(crate) const COLORED: [&str; 8] =
    ["forward and others", "backward", "gather", "reduce", "upload", "download", "recompute", "update"];

/// The color of an operation: several for compute, one for each other queue.
pub(crate) fn color(kind: &OpKind, queue: usize) -> usize {
    match kind {
        OpKind::Call(call) if call.is_backward() => 1,
        OpKind::Call(BlockCall::Forward(_, ForwardMode::Recompute)) => 6,
        OpKind::Direct(_) | OpKind::Update(_) => 7,
        _ if queue == 0 => 0,
        _ => queue + 1,
    }
}

pub(crate) fn title(plan: &Plan, kind: &OpKind) -> String {
    let unit = kind.unit().map(|unit| plan.layout.unit(unit).name.clone());
    let block = kind.block().map(|block| plan.spec.block(block).name.clone());
    let of =
        [unit, block].into_iter().flatten().filter(|name| !name.is_empty()).map(|name| format!(" {name}"));
    format!("{}{}", kind.name(), of.collect::<String>())
}
