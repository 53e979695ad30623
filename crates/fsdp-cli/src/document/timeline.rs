//! Operations of a step as bars on the lanes of their queues, as SVG.

use std::fmt::Write;

use fsdp_core::Queue;
use fsdp_core::plan::Plan;
use fsdp_core::program::{BlockCall, ForwardMode};
use fsdp_core::schedule::OpKind;

use super::page::{Page, escaped};

/// Maximum operations drawn; more would make the page slow.
pub(crate) const OPS_MAX: usize = 4000;

/// Width of a drawing, and of its names of queues.
pub(crate) const WIDTH: f64 = 1300.0;
pub(crate) const LEFT: f64 = 70.0;

const LANE: f64 = 18.0;

/// The categories with their own color, in the order of colors.
const COLORED: [&str; 8] =
    ["forward and others", "backward", "gather", "reduce", "upload", "download", "recompute", "update"];

/// An operation, its left edge and its width in pixels, and what is said of it beside its name.
pub(crate) type Bar = (OpKind, [f64; 2], String);

/// Draws operations on those of these queues that are used; `foot` stands below them.
pub(crate) fn svg(label: &str, plan: &Plan, bars: &[Bar], used: &[usize], foot: &str) -> String {
    let height = used.len() as f64 * LANE + if foot.is_empty() { 6.0 } else { 18.0 };
    let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"{label}\">");
    for (at, &queue) in used.iter().enumerate() {
        let y = at as f64 * LANE + 13.0;
        let _ = write!(svg, "<text x=\"0\" y=\"{y:.0}\">{}</text>", Queue::ALL[queue].name());
    }
    for (kind, [x, width], more) in bars {
        let at = used.iter().position(|&queue| queue == lane(kind)).unwrap_or_default();
        let _ = write!(
            svg,
            "<rect class=\"c{}\" x=\"{x:.1}\" y=\"{:.0}\" width=\"{width:.1}\" height=\"{:.0}\"><title>{}{more}</title></rect>",
            color(kind),
            at as f64 * LANE + 2.0,
            LANE - 4.0,
            escaped(&title(plan, kind))
        );
    }
    if !foot.is_empty() {
        let _ = write!(svg, "<text x=\"{LEFT}\" y=\"{:.0}\">{foot}</text>", height - 4.0);
    }
    svg + "</svg>"
}

/// The queues that these operations use.
pub(crate) fn used(kinds: impl Iterator<Item = OpKind> + Clone) -> Vec<usize> {
    (0..Queue::ALL.len()).filter(|&queue| kinds.clone().any(|kind| lane(&kind) == queue)).collect()
}

/// Explains the colors of these operations.
pub(crate) fn legend(page: &mut Page, kinds: impl Iterator<Item = OpKind>) {
    let mut colors: Vec<usize> = kinds.map(|kind| color(&kind)).collect();
    colors.sort_unstable();
    colors.dedup();
    page.legend(colors.into_iter().map(|color| (COLORED[color], color, "")));
}

/// The number of an operation's queue.
pub(crate) fn lane(kind: &OpKind) -> usize {
    let queue = kind.queue();
    Queue::ALL.iter().position(|&other| other == queue).expect("all queues are listed")
}

/// The color of an operation: several for compute, one for each other queue.
fn color(kind: &OpKind) -> usize {
    match (kind, lane(kind)) {
        (OpKind::Call(call), _) if call.is_backward() => 1,
        (OpKind::Call(BlockCall::Forward(_, ForwardMode::Recompute)), _) => 6,
        (OpKind::Direct(_) | OpKind::Update(_), _) => 7,
        (_, 0) => 0,
        (_, queue) => queue + 1,
    }
}

fn title(plan: &Plan, kind: &OpKind) -> String {
    let unit = kind.unit().map(|unit| plan.layout.unit(unit).name.clone());
    let block = kind.block().map(|block| plan.spec.block(block).name.clone());
    let of =
        [unit, block].into_iter().flatten().filter(|name| !name.is_empty()).map(|name| format!(" {name}"));
    format!("{}{}", kind.name(), of.collect::<String>())
}
