//! Collectives of compiled steps: the program of a step has all those of its schedule, in their order, and XLA for CPUs
//! (`FSDP_TEST_PJRT` names a plugin) keeps them all, because of the barriers of the program.

use std::collections::BTreeMap;

use fsdp_core::comm::Purpose;
use fsdp_core::plan::Plan;
use fsdp_core::schedule::{BufferId, OpKind};
use fsdp_xla::{Collective, Optimized, Order, Program, ProgramForm, Reduction, Target};

use crate::support::{GPT2, LLAMA, config, job};
use crate::xla::{LAYERS, NATIVE, TREE, plugin, traced};

/// A model, overrides, and the form of its program; on four ranks, with two micro-batches per step.
type Case<'a> = (&'a str, &'a [&'a str], ProgramForm);

const CASES: [Case<'_>; 20] = [
    (LLAMA, &[], NATIVE),
    (LLAMA, &[], TREE),
    (LLAMA, &["fsdp.reshard_after_forward=true"], NATIVE),
    (LLAMA, &["fsdp.reshard_after_forward=false"], NATIVE),
    (LLAMA, &["fsdp.reshard_after_forward=2"], NATIVE),
    (LLAMA, &["fsdp.mesh.replicate=2"], NATIVE),
    (LLAMA, &["fsdp.mesh.replicate=2"], TREE),
    (LLAMA, &["fsdp.forward_prefetch=0", "fsdp.backward_prefetch=0"], NATIVE),
    (LLAMA, &["fsdp.forward_prefetch=2", "fsdp.backward_prefetch=2"], NATIVE),
    (LLAMA, &["fsdp.activation_checkpointing=\"selective\""], NATIVE),
    (LLAMA, &["fsdp.activation_checkpointing=\"full\""], NATIVE),
    (LLAMA, &["fsdp.activation_checkpointing=\"full\"", "fsdp.reshard_after_forward=false"], NATIVE),
    (LLAMA, &["fsdp.activation_checkpointing=\"full\"", "fsdp.wrap=[]"], TREE),
    (LLAMA, &["fsdp.activation_checkpointing=\"selective\"", "fsdp.reshard_after_forward=false"], NATIVE),
    (LLAMA, &["fsdp.activation_checkpointing=\"full\"", "fsdp.mesh.replicate=4"], TREE),
    (LLAMA, &["fsdp.accumulation=\"unsharded\""], NATIVE),
    (LLAMA, &["fsdp.param_dtype=\"bf16\"", "fsdp.reduce_dtype=\"f32\""], NATIVE),
    (GPT2, &[], NATIVE),
    (GPT2, &["fsdp.activation_checkpointing=\"full\"", "fsdp.reshard_after_forward=true"], TREE),
    (GPT2, &["fsdp.param_dtype=\"bf16\"", "fsdp.mesh.replicate=2", "fsdp.forward_prefetch=2"], NATIVE),
];

/// Returns the plan and the program of a case.
fn written((model, overrides, form): Case<'_>) -> (Plan, Program) {
    let (vocab, wrap) = if model == LLAMA { (61, LAYERS) } else { (53, "fsdp.wrap=[\"GPT2Block\"]") };
    let overrides = [&["run.device=\"xla\"", wrap], overrides].concat();
    let dir = tempfile::tempdir().unwrap();
    let job = job(model, config(dir.path(), vocab, &overrides));
    let program = traced(&job, form);
    (Plan::clone(&job.plan), program)
}

/// Returns the collectives that a schedule has in a program: one per segment of a unit, and one for the scalars; none
/// for a group of one rank. With the tree, each gradient is sent to its owner (all-to-all) and copies are all-gathered.
fn scheduled(plan: &Plan, reduction: Reduction) -> Vec<Collective> {
    let size = |group| plan.mesh.group_size(group);
    let len = |buffer: &BufferId| plan.step.buffer(*buffer).len.expect("it is the same on all ranks");
    let mut found: Vec<Collective> = Vec::new();
    let mut push = |kind, of: String, elements| {
        let name = format!("{of}/{kind} {}", found.len());
        found.push(Collective { kind, elements, name });
    };
    for op in &plan.step.ops {
        let (group, kind, buffers, factor) = match (op.kind, reduction) {
            (OpKind::AllGather { group, .. }, _) => (size(group), "all-gather", &op.writes, 1),
            (OpKind::ReduceScatter { group, .. }, Reduction::Native) => {
                (size(group), "reduce-scatter", &op.writes, 1)
            }
            (OpKind::ReduceScatter { group, .. }, Reduction::Tree) => {
                (size(group), "all-to-all", &op.reads, 1)
            }
            (OpKind::AllReduce { group, .. }, Reduction::Native) => {
                (size(group), "all-reduce", &op.writes, 1)
            }
            (OpKind::AllReduce { group, .. }, Reduction::Tree) => {
                (size(group), "all-gather", &op.writes, size(group))
            }
            (OpKind::ReduceScalars, _) => {
                push("all-reduce", "scalars".to_owned(), len(&op.writes[0]));
                continue;
            }
            (other, _) => {
                assert!(!other.is_collective(), "{} is in no case", other.name());
                continue;
            }
        };
        let purpose = match op.kind {
            OpKind::AllGather { purpose, .. } => purpose,
            _ => Purpose::Gradient,
        };
        let of = format!("{}/unit {}", purpose.name(), op.kind.unit().unwrap().0);
        for buffer in buffers.iter().filter(|_| group > 1) {
            push(kind, of.clone(), factor * len(buffer));
        }
    }
    found
}

/// Returns what XLA keeps of a program.
fn compiled(target: &Target, program: &Program) -> Optimized {
    target.compile(program).unwrap().optimized.expect("this compiler shows what it has made")
}

#[test]
fn traced_collectives_follow_schedule_order() {
    for case in CASES {
        let (plan, program) = written(case);
        assert_eq!(program.collectives, scheduled(&plan, case.2.reduction), "{case:?}");
    }
}

/// The collectives are those of the schedule, in its order: none is merged with one of another unit, added or dropped.
/// Sums over replicas are combined for the segments of a unit.
#[test]
fn xla_keeps_all_collectives_in_schedule_order() {
    let Some(plugin) = plugin() else { return };
    let target = Target::open(&plugin, "cpu:4", Vec::new()).unwrap();
    for case in CASES {
        let (_, program) = written(case);
        let found = compiled(&target, &program);
        assert_eq!(Order::of(&program.collectives, &found.collectives), Order::Same, "{case:?}");
        for kind in Collective::KINDS {
            let of = |all: &[Collective]| -> (usize, usize) {
                let own = all.iter().filter(|one| one.kind == kind);
                (own.clone().count(), own.map(|one| one.elements).sum())
            };
            let (ours, left) = (of(&program.collectives), of(&found.collectives));
            assert_eq!(ours.1, left.1, "{case:?}, {kind}: elements");
            assert!(ours.0 == left.0 || kind == "all-reduce", "{case:?}, {kind}: {} of {}", left.0, ours.0);
        }
        assert_eq!(
            found.products, program.products,
            "{case:?}: nothing is computed once that was to be computed twice"
        );
    }
}

/// Removes the barriers from the text of a program: uses of their results become uses of their operands.
fn without_barriers(text: &str) -> String {
    let mut names: BTreeMap<String, String> = BTreeMap::new();
    let mut kept = String::new();
    for line in text.lines() {
        let line = renamed(line, &names);
        let Some((made, operands)) = line.split_once(" = stablehlo.optimization_barrier ") else {
            kept += &line;
            kept.push('\n');
            continue;
        };
        let made = made.trim().split(':').next().unwrap();
        let operands: Vec<&str> = operands.split(" : ").next().unwrap().split(", ").collect();
        match operands[..] {
            [operand] => drop(names.insert(made.to_owned(), operand.to_owned())),
            _ => names.extend(
                operands
                    .iter()
                    .enumerate()
                    .map(|(part, name)| (format!("{made}#{part}"), (*name).to_owned())),
            ),
        }
    }
    kept
}

/// Renames values in a line.
fn renamed(line: &str, names: &BTreeMap<String, String>) -> String {
    let mut parts = line.split('%');
    let mut text = parts.next().unwrap().to_owned();
    for part in parts {
        let end = part.find(|c: char| c != '#' && !c.is_alphanumeric()).unwrap_or(part.len());
        let name = format!("%{}", &part[..end]);
        text += names.get(&name).unwrap_or(&name);
        text += &part[end..];
    }
    text
}

/// Without barriers, XLA eliminates later gathers as duplicates of earlier ones, and recomputation as well.
#[test]
fn without_barriers_xla_merges_gathers_and_recomputation() {
    let Some(plugin) = plugin() else { return };
    let target = Target::open(&plugin, "cpu:4", Vec::new()).unwrap();
    let overrides = ["fsdp.reshard_after_forward=true", "fsdp.activation_checkpointing=\"full\""];
    let (plan, mut program) = written((LLAMA, &overrides, NATIVE));
    let count =
        |collectives: &[Collective]| collectives.iter().filter(|one| one.kind == "all-gather").count();
    let gathers = count(&program.collectives);
    assert_eq!(count(&compiled(&target, &program).collectives), gathers);
    program.text = without_barriers(&program.text);
    assert!(!program.text.contains("optimization_barrier"));
    let merged = compiled(&target, &program);
    let segments: usize = plan.layout.units.iter().map(|unit| unit.segments.len()).sum();
    assert!(segments < gathers);
    assert_eq!(count(&merged.collectives), segments, "each segment is gathered once in a step");
    assert!(
        merged.products < program.products,
        "{} of {} products are left",
        merged.products,
        program.products
    );
}
