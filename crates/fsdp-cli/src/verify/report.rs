//! Formats a verification as text.

use std::collections::BTreeSet;

use fsdp_core::{Axis, Mesh};
use fsdp_train::verify::{Difference, Skipped, VerifyReport, WorldReport};
use serde_json::Value;

use crate::document::{Document, Mark, Report, json};
use crate::units::{bytes, counted, params};

/// Maximum losses shown; longer lists show both ends.
const LOSSES_SHOWN: usize = 6;

impl Report for VerifyReport {
    fn json(&self) -> Value {
        json(self)
    }

    fn write(&self, to: &mut dyn Document) {
        let Self { parameters, units, micro_batches, oracle_losses, worlds, skipped, .. } = self;
        let parameters = params(*parameters);
        to.line(&format!("{parameters} parameters in {units} units, {micro_batches} micro-batches per step"));
        if !oracle_losses.is_empty() {
            to.line(&format!("losses without sharding: {}", losses(oracle_losses)));
        }
        worlds.iter().for_each(|world| write_world(world, to));
        if !skipped.is_empty() {
            to.gap();
        }
        let skipped = skipped.iter().map(|Skipped { world, reason }| format!("world {world}: {reason}"));
        to.each(Mark::Warning, "skipped", skipped);
        to.gap();
        let sizes: BTreeSet<usize> = worlds.iter().map(|world| world.world).collect();
        let kind = if sizes.len() == worlds.len() { "world size" } else { "mesh" };
        let broken = worlds.iter().filter(|world| !world.failures.is_empty()).count();
        let (mark, verdict) = match (broken, worlds.len()) {
            (_, 0) => {
                (Mark::Bad, "no world size was verified: none of them fits the configuration".to_owned())
            }
            (0, all) => (Mark::Good, format!("every promise was kept at {}", counted(all, kind))),
            (_, all) => (Mark::Bad, format!("broken promises at {broken} of {}", counted(all, kind))),
        };
        to.marked(mark, &verdict, "");
    }
}

fn write_world(world: &WorldReport, to: &mut dyn Document) {
    to.gap();
    let WorldReport { replicas, shards, context, expert, promise, failures, .. } = world;
    let axes = [(Axis::Replicate, *replicas), (Axis::Shard, *shards), (Axis::Context, *context)];
    let mesh = Mesh::new(axes).and_then(|mesh| mesh.with_expert(*expert));
    let mesh = mesh.expect("a world that was verified has a mesh");
    to.marked(
        Mark::Heading,
        &format!("world {}", world.world),
        &format!(": mesh {mesh}, promised: {promise}"),
    );
    to.table(["compared", "largest difference", "differing", "elements"], differences(world));
    to.table(["collective", "calls", "closed form", "bytes", "closed form"], traffic(world));
    to.table(["memory (the largest rank)", "counted", "predicted"], memory(world));
    to.each(Mark::Bad, "broken:", failures);
    if failures.is_empty() {
        to.marked(Mark::Good, "kept", "");
    }
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
