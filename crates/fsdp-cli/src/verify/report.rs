//! Formats a verification as text.

use std::fmt::Write;
use std::io;

use fsdp_core::{Axis, Mesh};
use fsdp_train::verify::{Difference, VerifyReport, WorldReport};

use crate::output::{Paint, table};
use crate::units::{bytes, params};

/// Maximum losses shown; longer lists show both ends.
const LOSSES_SHOWN: usize = 6;

/// Formats a report.
pub(super) fn render(report: &VerifyReport) -> String {
    let paint = Paint::of(&io::stdout());
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{} parameters in {} units, {} micro-batches per step",
        params(report.parameters),
        report.units,
        report.micro_batches
    );
    if !report.oracle_losses.is_empty() {
        let _ = writeln!(text, "losses without sharding: {}", losses(&report.oracle_losses));
    }
    for world in &report.worlds {
        let _ = write!(text, "\n{}", render_world(world, paint));
    }
    if !report.skipped.is_empty() {
        let _ = writeln!(text);
    }
    for skipped in &report.skipped {
        let _ = writeln!(text, "{} world {}: {}", paint.warning("skipped"), skipped.world, skipped.reason);
    }
    let _ = writeln!(text, "\n{}", verdict(report, paint));
    text
}

fn verdict(report: &VerifyReport, paint: Paint) -> String {
    let broken = report.worlds.iter().filter(|world| !world.failures.is_empty()).count();
    let all = report.worlds.len();
    if all == 0 {
        return paint.bad("no world size was verified: none of them fits the configuration");
    }
    if broken > 0 {
        return paint.bad(&format!("broken promises at {broken} of {all} world sizes"));
    }
    paint.good(&format!("every promise was kept at {all} world size{}", if all == 1 { "" } else { "s" }))
}

fn render_world(world: &WorldReport, paint: Paint) -> String {
    let mut text = String::new();
    let title = format!("world {}", world.world);
    let axes =
        [(Axis::Replicate, world.replicas), (Axis::Shard, world.shards), (Axis::Context, world.context)];
    let mesh = Mesh::new(axes).expect("a world that was verified has ranks");
    let _ = writeln!(text, "{}: mesh {mesh}, promised: {}", paint.heading(&title), world.promise);
    text += &table(["compared", "largest difference", "differing", "elements"], differences(world));
    text += &table(["collective", "calls", "closed form", "bytes", "closed form"], traffic(world));
    text += &table(["memory (the largest rank)", "counted", "predicted"], memory(world));
    for failure in &world.failures {
        let _ = writeln!(text, "{} {failure}", paint.bad("broken:"));
    }
    if world.failures.is_empty() {
        let _ = writeln!(text, "{}", paint.good("kept"));
    }
    text
}

fn differences(world: &WorldReport) -> Vec<[String; 4]> {
    let scalar = |name: &str, value: f64| [name.to_owned(), number(value), String::new(), String::new()];
    let tensor = |name: &str, difference: &Difference| {
        let place = match &difference.param {
            Some(param) => format!(" at {param}[{}]", difference.element),
            None => String::new(),
        };
        let largest = format!("{}{place}", number(difference.largest));
        [name.to_owned(), largest, difference.differing.to_string(), difference.compared.to_string()]
    };
    vec![
        scalar("loss", world.loss_difference),
        scalar("gradient norm", world.norm_difference),
        tensor("gradients, first step", &world.gradients),
        tensor("parameters, last step", &world.params),
        tensor("optimizer state, last step", &world.states),
    ]
}

fn traffic(world: &WorldReport) -> Vec<[String; 5]> {
    let rows = world.traffic.iter().map(|line| {
        let [calls, expected_calls] = [line.calls, line.expected_calls].map(|count| count.to_string());
        let [sent, expected] = [line.bytes, line.expected_bytes].map(|count| count.to_string());
        [line.collective.to_owned(), calls, expected_calls, sent, expected]
    });
    rows.collect()
}

fn memory(world: &WorldReport) -> Vec<[String; 3]> {
    let used = world.memory.iter().filter(|line| line.counted_bytes + line.predicted_bytes > 0);
    used.map(|line| {
        let exact = |count: usize| format!("{} ({})", count, bytes(count as u64));
        let of = if line.place == "host" { "on the host: " } else { "" };
        [format!("{of}{}", line.category), exact(line.counted_bytes), exact(line.predicted_bytes)]
    })
    .collect()
}

fn losses(losses: &[f64]) -> String {
    let shown = |losses: &[f64]| losses.iter().map(|loss| format!("{loss:.6}")).collect::<Vec<_>>().join(" ");
    if losses.len() <= LOSSES_SHOWN {
        return shown(losses);
    }
    let half = LOSSES_SHOWN / 2;
    format!("{} ... {}", shown(&losses[..half]), shown(&losses[losses.len() - half..]))
}

fn number(value: f64) -> String {
    if value == 0.0 { "0".to_owned() } else { format!("{value:.3e}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_loss_lists_show_both_ends() {
        let many: Vec<f64> = (0..10).map(f64::from).collect();
        assert_eq!(losses(&many[..2]), "0.000000 1.000000");
        assert!(losses(&many).contains("2.000000 ... 7.000000"));
    }

    #[test]
    fn zero_difference_is_formatted_as_0() {
        assert_eq!(number(0.0), "0");
        assert_eq!(number(1.5e-9), "1.500e-9");
    }
}
