//! Formats the joint findings of processes as text.

use std::fmt::Write;

use super::folder::{Lock, View};
use super::links::Pair;
use super::together::{Node, Together};
use crate::output::{Paint, grid, table};
use crate::units::bytes;

/// Number of pairs shown if a table of the cluster would be too wide.
const PAIRS_SHOWN: usize = 10;

/// Maximum nodes named in a cell.
const NAMED_MAX: usize = 4;

/// Maximum characters of a library's state.
const STATE_MAX: usize = 60;

/// The text of a report.
pub(super) fn render(found: &Together, paint: Paint) -> String {
    let mut text = head(found);
    let _ = write!(text, "\n{}", nodes(found));
    if found.nodes.len() > 1 {
        let _ = write!(text, "\n{}", links(found, paint));
    }
    let _ = write!(text, "\n{}", libraries(found));
    let _ = writeln!(text, "\n{}", devices(found).trim_end());
    let _ =
        write!(text, "\n{}\n{}", paint.heading(&format!("output folder {}", found.out_dir)), folder(found));
    let warnings = found.warnings.iter().map(|warning| format!("{} {warning}\n", paint.warning("warning:")));
    let broken = found.broken.iter().map(|broken| format!("{} {broken}\n", paint.bad("broken:")));
    let problems: String = warnings.chain(broken).collect();
    if !problems.is_empty() {
        let _ = write!(text, "\n{problems}");
    }
    let verdict = match (found.broken.is_empty(), found.warnings.is_empty()) {
        (true, true) => paint.good("nothing is wrong"),
        (true, false) => paint.good("a run can work"),
        (false, _) => paint.bad("a run would fail"),
    };
    let _ = writeln!(text, "\n{verdict}");
    text
}

fn head(found: &Together) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| {
        let _ = writeln!(text, "{name:<16}{value}");
    };
    match &found.launcher {
        Some(launcher) => {
            let variables: Vec<String> =
                launcher.variables.iter().map(|(name, value)| format!("{name}={value}")).collect();
            line("started by", &format!("{} ({})", launcher.name, variables.join(", ")));
        }
        None => line("started by", "no known launcher: this process is alone"),
    }
    line("processes", &format!("{} on {}", found.processes, count(found.nodes.len(), "node")));
    found.found_by.iter().for_each(|address| line("found by", address));
    line("connected over", &found.transport);
    text
}

fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

fn nodes(found: &Together) -> String {
    let row = |node: &Node| {
        let last = node.first_process + node.processes - 1;
        let processes = match node.processes {
            1 => node.first_process.to_string(),
            _ => format!("{} to {last}", node.first_process),
        };
        let clock = match node.clock {
            _ if node.first_process == 0 => String::new(),
            Some(clock) => format!("{:+.3} ± {:.3}", clock.ahead_ms, clock.uncertainty_ms),
            None => String::new(),
        };
        [node.name.clone(), processes, node.interfaces.join(", "), clock, node.cpu.clone()]
    };
    table(["node", "processes", "reached at", "clock ahead, ms", "CPU"], found.nodes.iter().map(row))
}

fn links(found: &Together, paint: Paint) -> String {
    let mut text = String::new();
    // NCCL is not measured.
    let transport = if found.transport == "NCCL" { "TCP" } else { &found.transport };
    let title = format!(
        "links over {transport}: latency (half of a round trip) and bandwidth, from the row to the column"
    );
    let _ = writeln!(text, "{}", paint.heading(&title));
    if let Some(partners) = found.sampled {
        let _ = writeln!(
            text,
            "each node was measured with {partners} others; the slowest of {}",
            found.links.len()
        );
        return text + &slowest(found);
    }
    let names = || found.nodes.iter().map(|node| node.name.clone());
    let pair_of = |row: usize, column: usize| {
        let pair = [row.min(column), row.max(column)];
        found.links.iter().find(|link| link.nodes == pair)
    };
    let matrix = |title: &str, cell: &dyn Fn(&Pair, usize) -> String| {
        let header = std::iter::once(title.to_owned()).chain(names());
        let row = |(row, name): (usize, String)| -> Vec<String> {
            let cells = (0..found.nodes.len()).map(|column| {
                pair_of(row, column).map_or(String::new(), |pair| cell(pair, usize::from(row > column)))
            });
            std::iter::once(name).chain(cells).collect()
        };
        grid(header.collect(), names().enumerate().map(row))
    };
    text += &matrix("µs", &|pair, _| format!("{:.1}", pair.latency_us));
    text += &matrix("GB/s", &|pair, direction| format!("{:.2}", pair.gb_per_s[direction]));
    text
}

/// The pairs with the lowest bandwidth.
fn slowest(found: &Together) -> String {
    let min_bandwidth = |pair: &Pair| pair.gb_per_s[0].min(pair.gb_per_s[1]);
    let mut pairs: Vec<&Pair> = found.links.iter().collect();
    pairs.sort_by(|a, b| min_bandwidth(a).total_cmp(&min_bandwidth(b)));
    let row = |pair: &Pair| {
        let [first, second] = pair.nodes.map(|node| found.nodes[node].name.clone());
        let [there, back] = pair.gb_per_s.map(|speed| format!("{speed:.2}"));
        [first, second, format!("{:.1}", pair.latency_us), there, back]
    };
    let rows = pairs.into_iter().take(PAIRS_SHOWN).map(row);
    table(["node", "and", "µs", "GB/s there", "GB/s back"], rows)
}

fn libraries(found: &Together) -> String {
    let mut rows = Vec::new();
    for (part, states) in found.libraries() {
        for (state, nodes) in states {
            let state: String = state.lines().next().unwrap_or_default().chars().take(STATE_MAX).collect();
            rows.push([part.to_owned(), state, node_list(&nodes, found.nodes.len())]);
        }
    }
    rows.insert(0, ["fsdp", &found.version, "all"].map(str::to_owned));
    table(["library", "version", "nodes"], rows)
}

fn devices(found: &Together) -> String {
    let mut text = String::new();
    let devices =
        found.nodes.iter().flat_map(|node| node.devices.iter().map(move |device| (device, &*node.name)));
    let mut lines: Vec<(String, Vec<&str>)> = Vec::new();
    for (device, node) in devices {
        let line = device.to_string();
        match lines.iter_mut().find(|(other, _)| *other == line) {
            Some((_, nodes)) => nodes.push(node),
            None => lines.push((line, vec![node])),
        }
    }
    for (line, nodes) in lines {
        let on = node_list(&nodes, found.nodes.len());
        let _ = match on.as_str() {
            "all" => writeln!(text, "{line}"),
            _ => writeln!(text, "{line} (on {on})"),
        };
    }
    text
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

fn folder(found: &Together) -> String {
    let row = |node: &Node| {
        let View { free_bytes, seen_after_ms, lock, .. } = &node.out_dir;
        let lock = match lock {
            Some(Lock::Excludes) => "keeps others out",
            Some(Lock::Ignored) => "not seen",
            Some(Lock::Unsupported) => "none",
            None => "",
        };
        let seen = seen_after_ms.map_or("never".to_owned(), |after| format!("{after:.1} ms"));
        [node.name.clone(), free_bytes.map_or("unknown".to_owned(), bytes), seen, lock.to_owned()]
    };
    let header = ["node", "free", "sees a file after", "lock of process 0"];
    table(header, found.nodes.iter().map(row))
}

#[cfg(test)]
mod tests;
