//! Draws the step of a run's configuration: predicted memory, and the schedule's operations on their queues.

use std::path::Path;

use fsdp_config::World;
use fsdp_core::memory::{Category, Usage};
use fsdp_core::plan::Plan;
use fsdp_core::schedule::Op;
use fsdp_core::{Queue, Rank};
use fsdp_nn::HostMemory;
use fsdp_nn::model::Architecture;
use fsdp_train::{plan, predict};

use crate::args::RunFileArgs;
use crate::document::bars;
use crate::document::chart::COLORS;
use crate::document::page::{Page, escaped};
use crate::document::timeline::{self, Bar, LEFT, OPS_MAX, WIDTH, lane};
use crate::error::CliError;
use crate::run_setup::RunSetup;
use crate::units::bytes;

/// Operations per row of the timeline.
const OPS_PER_ROW: usize = 160;

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
    let bars = |what: &dyn Fn(&Usage) -> usize| -> Vec<bars::Bar> {
        steps.iter().map(|(run, step)| bar(*run, what(&step.usage))).collect()
    };
    let used = |category: &Category| steps.iter().any(|(_, step)| of(&step.usage, *category) > 0);
    let categories = Category::ALL.into_iter().filter(used);
    let mut rows: Vec<(String, Vec<bars::Bar>)> =
        categories.map(|category| (category.name().to_owned(), bars(&|usage| of(usage, category)))).collect();
    rows.push((
        "all together".to_owned(),
        bars(&|usage| usage.device.total_peak_bytes + usage.host.total_peak_bytes),
    ));
    let svg = bars::svg("Memory by category", &rows);
    page.html(&format!("<figure><h3>Memory of rank 0, predicted peaks</h3>{svg}"));
    page.html("<p class=\"note\">Categories have their peaks at different times, so these do not add up.</p></figure>");
}

#[expect(clippy::cast_precision_loss, reason = "the length of a bar")]
fn bar(run: usize, count: usize) -> bars::Bar {
    (run % COLORS, count as f64, bytes(count as u64))
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
    timeline::legend(page, plan.step.ops[..shown].iter().map(|op| op.kind));
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

/// One row of the timeline, starting at a column.
#[expect(clippy::cast_precision_loss, reason = "pixels")]
fn row(plan: &Plan, places: &[usize], first: usize) -> String {
    let width = (WIDTH - LEFT) / OPS_PER_ROW as f64;
    let in_row = |(_, place): &(&Op, &usize)| (first..first + OPS_PER_ROW).contains(*place);
    let bar = |(op, place): (&Op, &usize)| {
        (op.kind, [LEFT + (place - first) as f64 * width, width - 1.0], String::new())
    };
    let bars: Vec<Bar> = plan.step.ops.iter().zip(places).filter(in_row).map(bar).collect();
    let used = timeline::used(bars.iter().map(|bar| bar.0));
    timeline::svg("Operations by queue", plan, &bars, &used, "")
}
