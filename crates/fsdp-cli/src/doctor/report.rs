//! Formats the joint findings of processes as text.

use serde_json::Value;

use super::folder::{Lock, View};
use super::links::{Clock, Pair};
use super::together::{Node, Together};
use crate::document::{Document, Mark, Report, json};
use crate::units::{bytes, counted};

/// Number of pairs shown if a table of the cluster would be too wide.
const PAIRS_SHOWN: usize = 10;

/// Width of the names of facts.
const HEAD_WIDTH: usize = 16;

/// Maximum nodes named in a cell.
const NAMED_MAX: usize = 4;

/// Maximum characters of a library's state.
const STATE_MAX: usize = 60;

impl Report for Together {
    fn json(&self) -> Value {
        json(self)
    }

    fn write(&self, to: &mut dyn Document) {
        write_head(self, to);
        to.gap();
        to.table(["node", "processes", "reached at", "clock ahead, ms", "CPU"], self.nodes.iter().map(node));
        if self.nodes.len() > 1 {
            to.gap();
            write_links(self, to);
        }
        to.gap();
        to.table(["library", "version", "nodes"], libraries(self));
        to.gap();
        to.block(&devices(self));
        to.section(&format!("output folder {}", self.out_dir));
        let header = ["node", "free", "sees a file after", "lock of process 0"];
        to.table(header, self.nodes.iter().map(folder));
        if !(self.warnings.is_empty() && self.broken.is_empty()) {
            to.gap();
        }
        to.each(Mark::Warning, "warning:", &self.warnings);
        to.each(Mark::Bad, "broken:", &self.broken);
        to.gap();
        let (mark, verdict) = match (self.broken.is_empty(), self.warnings.is_empty()) {
            (true, true) => (Mark::Good, "nothing is wrong"),
            (true, false) => (Mark::Good, "a run can work"),
            (false, _) => (Mark::Bad, "a run would fail"),
        };
        to.marked(mark, verdict, "");
    }
}

fn write_head(found: &Together, to: &mut dyn Document) {
    let launcher = match &found.launcher {
        Some(launcher) => {
            let variables: Vec<String> =
                launcher.variables.iter().map(|(name, value)| format!("{name}={value}")).collect();
            format!("{} ({})", launcher.name, variables.join(", "))
        }
        None => "no known launcher: this process is alone".to_owned(),
    };
    let processes = format!("{} on {}", found.processes, counted(found.nodes.len(), "node"));
    let mut rows = vec![("started by", launcher), ("processes", processes)];
    rows.extend(found.found_by.iter().map(|address| ("found by", address.clone())));
    rows.push(("connected over", found.transport.clone()));
    rows.into_iter().for_each(|(name, value)| to.pairs(HEAD_WIDTH, &[[name.to_owned(), value]]));
}

fn node(node: &Node) -> [String; 5] {
    let processes = match node.processes {
        1 => node.first_process.to_string(),
        processes => format!("{} to {}", node.first_process, node.first_process + processes - 1),
    };
    let clock = node.clock.filter(|_| node.first_process > 0);
    let clock = clock.map_or_else(String::new, |Clock { ahead_ms, uncertainty_ms }| {
        format!("{ahead_ms:+.3} ± {uncertainty_ms:.3}")
    });
    [node.name.clone(), processes, node.interfaces.join(", "), clock, node.cpu.clone()]
}

fn write_links(found: &Together, to: &mut dyn Document) {
    // NCCL is not measured.
    let transport = if found.transport == "NCCL" { "TCP" } else { &found.transport };
    let title = format!(
        "links over {transport}: latency (half of a round trip) and bandwidth, from the row to the column"
    );
    to.marked(Mark::Heading, &title, "");
    if let Some(partners) = found.sampled {
        let links = found.links.len();
        to.line(&format!("each node was measured with {partners} others; the slowest of {links}"));
        return to.table(["node", "and", "µs", "GB/s there", "GB/s back"], slowest(found));
    }
    let names = || found.nodes.iter().map(|node| node.name.clone());
    let pair_of = |row: usize, column: usize| {
        let pair = [row.min(column), row.max(column)];
        found.links.iter().find(|link| link.nodes == pair)
    };
    let mut matrix = |title: &str, cell: &dyn Fn(&Pair, usize) -> String| {
        let header = std::iter::once(title.to_owned()).chain(names());
        let row = |(row, name): (usize, String)| -> Vec<String> {
            let cells = (0..found.nodes.len()).map(|column| {
                pair_of(row, column).map_or(String::new(), |pair| cell(pair, usize::from(row > column)))
            });
            std::iter::once(name).chain(cells).collect()
        };
        to.grid(header.collect(), names().enumerate().map(row).collect());
    };
    matrix("µs", &|pair, _| format!("{:.1}", pair.latency_us));
    matrix("GB/s", &|pair, direction| format!("{:.2}", pair.gb_per_s[direction]));
}

/// The pairs with the lowest bandwidth.
fn slowest(found: &Together) -> impl Iterator<Item = [String; 5]> {
    let min_bandwidth = |pair: &Pair| pair.gb_per_s[0].min(pair.gb_per_s[1]);
    let mut pairs: Vec<&Pair> = found.links.iter().collect();
    pairs.sort_by(|a, b| min_bandwidth(a).total_cmp(&min_bandwidth(b)));
    let row = move |pair: &Pair| {
        let [first, second] = pair.nodes.map(|node| found.nodes[node].name.clone());
        let [there, back] = pair.gb_per_s.map(|speed| format!("{speed:.2}"));
        [first, second, format!("{:.1}", pair.latency_us), there, back]
    };
    pairs.into_iter().take(PAIRS_SHOWN).map(row)
}

fn libraries(found: &Together) -> Vec<[String; 3]> {
    let mut rows = Vec::new();
    for (part, states) in found.libraries() {
        for (state, nodes) in states {
            let state: String = state.lines().next().unwrap_or_default().chars().take(STATE_MAX).collect();
            rows.push([part.to_owned(), state, node_list(&nodes, found.nodes.len())]);
        }
    }
    rows.insert(0, ["fsdp", &found.version, "all"].map(str::to_owned));
    rows
}

fn devices(found: &Together) -> String {
    let mut lines: Vec<(String, Vec<&str>)> = Vec::new();
    for node in &found.nodes {
        for line in node.devices.iter().map(ToString::to_string) {
            match lines.iter_mut().find(|(other, _)| *other == line) {
                Some((_, nodes)) => nodes.push(&node.name),
                None => lines.push((line, vec![&node.name])),
            }
        }
    }
    let shown = |(line, nodes): (String, Vec<&str>)| match node_list(&nodes, found.nodes.len()).as_str() {
        "all" => format!("{line}\n"),
        on => format!("{line} (on {on})\n"),
    };
    lines.into_iter().map(shown).collect()
}

/// Formats nodes for a cell.
fn node_list(nodes: &[&str], all: usize) -> String {
    match nodes.len() {
        count if count == all => "all".to_owned(),
        count if count > NAMED_MAX => {
            format!("{} and {} more", nodes[..NAMED_MAX].join(", "), count - NAMED_MAX)
        }
        _ => nodes.join(", "),
    }
}

fn folder(node: &Node) -> [String; 4] {
    let View { free_bytes, seen_after_ms, lock, .. } = &node.out_dir;
    let lock = match lock {
        Some(Lock::Excludes) => "keeps others out",
        Some(Lock::Ignored) => "not seen",
        Some(Lock::Unsupported) => "none",
        None => "",
    };
    let seen = seen_after_ms.map_or("never".to_owned(), |after| format!("{after:.1} ms"));
    [node.name.clone(), free_bytes.map_or("unknown".to_owned(), bytes), seen, lock.to_owned()]
}

#[cfg(test)]
mod tests;
