use std::collections::BTreeMap;

use super::super::Usable;
use super::super::links::Clock;
use super::super::together::{Launched, Library};
use super::*;
use crate::document::text::Text;
use crate::output::Paint;

fn render(found: &Together) -> String {
    Text::of(Paint::none(), |to| found.write(to))
}

fn node(number: usize) -> Node {
    let library = |part: &str, is_good, state: &str| Library {
        part: part.to_owned(),
        is_good,
        state: state.to_owned(),
    };
    Node {
        name: format!("n{number}"),
        host: format!("n{number}"),
        first_process: 8 * number,
        processes: 8,
        cpu: "AMD EPYC 9654".to_owned(),
        interfaces: vec![format!("eth0 10.0.0.{number}")],
        libraries: vec![library("NCCL", true, "2.28.9"), library("MPI", false, "not found")],
        devices: vec![Usable {
            device: "cpu".to_owned(),
            usable: true,
            with: "the kernels of fsdp".to_owned(),
        }],
        clock: Some(Clock { ahead_ms: 0.25 * number as f64, uncertainty_ms: 0.031 }),
        out_dir: View {
            free_bytes: Some(3 << 40),
            seen_after_ms: Some(1.5 * number as f64),
            lock: Some(Lock::Excludes),
            faults: Vec::new(),
        },
    }
}

fn pair(first: usize, second: usize) -> Pair {
    let distance = (second - first) as f64;
    Pair { nodes: [first, second], latency_us: 10.0 * distance, gb_per_s: [12.0 / distance, 11.0 / distance] }
}

fn together(nodes: usize) -> Together {
    let variables = [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "24")];
    let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let pairs = (0..nodes).flat_map(|first| (first + 1..nodes).map(move |second| pair(first, second)));
    Together {
        version: "0.1.0".to_owned(),
        launcher: Some(Launched { name: "srun".to_owned(), variables: BTreeMap::from(variables) }),
        processes: 8 * nodes,
        found_by: Some("n0:24567".to_owned()),
        transport: "TCP".to_owned(),
        nodes: (0..nodes).map(node).collect(),
        links: pairs.collect(),
        sampled: (nodes > 16).then_some(15),
        out_dir: "/shared/out".to_owned(),
        warnings: Vec::new(),
        broken: Vec::new(),
    }
}

#[test]
fn identical_healthy_nodes_report_nothing_wrong() {
    let mut found = together(3);
    found.judge();
    insta::assert_snapshot!(render(&found), @r#"
    started by      srun (SLURM_PROCID=0, SLURM_STEP_NUM_TASKS=24)
    processes       24 on 3 nodes
    found by        n0:24567
    connected over  TCP

     node   processes   reached at      clock ahead, ms   CPU
    ────────────────────────────────────────────────────────────────────
     n0        0 to 7   eth0 10.0.0.0                     AMD EPYC 9654
     n1       8 to 15   eth0 10.0.0.1    +0.250 ± 0.031   AMD EPYC 9654
     n2      16 to 23   eth0 10.0.0.2    +0.500 ± 0.031   AMD EPYC 9654

    links over TCP: latency (half of a round trip) and bandwidth, from the row to the column
     µs     n0     n1     n2
    ─────────────────────────
     n0          10.0   20.0
     n1   10.0          10.0
     n2   20.0   10.0
     GB/s      n0      n1      n2
    ──────────────────────────────
     n0             12.00    6.00
     n1     11.00           12.00
     n2      5.50   11.00

     library     version   nodes
    ─────────────────────────────
     fsdp          0.1.0   all
     NCCL         2.28.9   all
     MPI       not found   all

    run.device = "cpu": usable, the kernels of fsdp

    output folder /shared/out
     node      free   sees a file after   lock of process 0
    ────────────────────────────────────────────────────────
     n0     3.0 TiB              0.0 ms   keeps others out
     n1     3.0 TiB              1.5 ms   keeps others out
     n2     3.0 TiB              3.0 ms   keeps others out

    nothing is wrong
    "#);
}

#[test]
fn problems_name_affected_nodes() {
    let mut found = together(3);
    found.nodes[1].cpu = "Intel Xeon 8480".to_owned();
    found.nodes[1].libraries[0].state = "2.21.5".to_owned();
    found.nodes[1].clock = Some(Clock { ahead_ms: -61_000.0, uncertainty_ms: 0.2 });
    found.nodes[1].out_dir.lock = Some(Lock::Ignored);
    found.nodes[1].out_dir.seen_after_ms = Some(29_500.0);
    found.nodes[2].out_dir = View {
        faults: vec!["a file that process 0 wrote to /shared/out did not appear within 65 s".to_owned()],
        ..View::default()
    };
    found.judge();
    let text = render(&found);
    let shown = text.lines().skip_while(|line| !line.starts_with(" library"));
    insta::assert_snapshot!(shown.collect::<Vec<_>>().join("\n"), @r#"
     library     version   nodes
    ──────────────────────────────
     fsdp          0.1.0   all
     NCCL         2.21.5   n1
     NCCL         2.28.9   n0, n2
     MPI       not found   all

    run.device = "cpu": usable, the kernels of fsdp

    output folder /shared/out
     node      free   sees a file after   lock of process 0
    ────────────────────────────────────────────────────────
     n0     3.0 TiB              0.0 ms   keeps others out
     n1     3.0 TiB          29500.0 ms   not seen
     n2     unknown               never

    warning: the nodes have different CPUs: AMD EPYC 9654 (n0, n2); Intel Xeon 8480 (n1); equal bits are promised only on CPUs of one model
    warning: n1: a lock held by process 0 has no effect in /shared/out: a second run there would not be noticed
    warning: n1 sees a file that process 0 writes to /shared/out only after 29.5 s
    warning: the clock of n1 is 61.0 s behind that of process 0
    warning: the nodes have different versions of NCCL
    broken: n2: a file that process 0 wrote to /shared/out did not appear within 65 s

    a run would fail
    "#);
}

#[test]
fn many_nodes_show_only_slowest_pairs() {
    let mut found = together(40);
    found.judge();
    let text = render(&found);
    let shown: Vec<&str> = text
        .lines()
        .skip_while(|line| !line.starts_with("links"))
        .take_while(|line| !line.is_empty())
        .collect();
    insta::assert_snapshot!(shown[..6].join("\n"), @r"
    links over TCP: latency (half of a round trip) and bandwidth, from the row to the column
    each node was measured with 15 others; the slowest of 780
     node   and      µs   GB/s there   GB/s back
    ─────────────────────────────────────────────
     n0     n39   390.0         0.31        0.28
     n0     n38   380.0         0.32        0.29
    ");
    assert_eq!(shown.len(), 4 + PAIRS_SHOWN);
}

#[test]
fn json_includes_links_nodes_and_launcher() {
    let found = serde_json::to_value(together(3)).unwrap();
    assert_eq!(found["links"].as_array().unwrap().len(), 3);
    assert_eq!(found["nodes"][2]["clock"]["ahead_ms"], 0.5);
    assert_eq!(found["nodes"][1]["out_dir"]["lock"], "excludes");
    assert_eq!(found["launcher"]["variables"]["SLURM_PROCID"], "0");
}
