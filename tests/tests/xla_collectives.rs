//! Which collectives of a schedule are in the program of its step: each, in its place. And which of them XLA for processors leaves
//! (`FSDP_TEST_PJRT` names a plugin): all of them, and why.

use std::collections::{BTreeMap, VecDeque};

use fsdp_core::plan::Plan;
use fsdp_core::schedule::{BufferId, OpKind, Source};
use fsdp_xla::{Collective, Optimized, Program, ProgramForm, Reduction, Target};

use crate::support::{GPT2, LLAMA, config, job};
use crate::xla::{LAYERS, NATIVE, TREE, plugin, traced};

/// A model, changes of its run file, and how gradients are added; on four ranks, with two micro-batches in a step.
type Case<'a> = (&'a str, &'a [&'a str], ProgramForm);

const CASES: [Case<'_>; 16] = [
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
    (LLAMA, &["fsdp.accumulation=\"unsharded\""], NATIVE),
    (LLAMA, &["fsdp.param_dtype=\"bf16\"", "fsdp.reduce_dtype=\"f32\""], NATIVE),
    (GPT2, &[], NATIVE),
    (GPT2, &["fsdp.activation_checkpointing=\"full\"", "fsdp.reshard_after_forward=true"], TREE),
    (GPT2, &["fsdp.param_dtype=\"bf16\"", "fsdp.mesh.replicate=2", "fsdp.forward_prefetch=2"], NATIVE),
];

/// The plan and the program of a case.
fn written((model, overrides, form): Case<'_>) -> (Plan, Program) {
    let (vocab, wrap) = if model == LLAMA { (61, LAYERS) } else { (53, "fsdp.wrap=[\"GPT2Block\"]") };
    let overrides = [&["run.device=\"xla\"", wrap], overrides].concat();
    let dir = tempfile::tempdir().unwrap();
    let job = job(model, config(dir.path(), vocab, &overrides));
    let program = traced(&job, form);
    (Plan::clone(&job.plan), program)
}

/// What the operations of a schedule are in a program: one collective for each segment of a unit, and one for the scalars.
/// A group of one rank has none. Added by the tree, what is reduced is sent to whom it belongs, and copies are gathered.
fn scheduled(plan: &Plan, reduction: Reduction) -> Vec<Collective> {
    let (shards, replicas) = (plan.mesh.shards(), plan.mesh.replicas());
    let len = |buffer: &BufferId| plan.step.buffer(*buffer).len.expect("it is the same on all ranks");
    let mut found = Vec::new();
    for op in &plan.step.ops {
        let (group, kind, buffers, factor) = match (op.kind, reduction) {
            (OpKind::AllGather { source: Source::SubShard, .. }, _) => {
                (plan.step.sub_group.unwrap(), "all-gather", &op.writes, 1)
            }
            (OpKind::AllGather { .. }, _) => (shards, "all-gather", &op.writes, 1),
            (OpKind::ReduceScatter { .. }, Reduction::Native) => (shards, "reduce-scatter", &op.writes, 1),
            (OpKind::ReduceScatter { .. }, Reduction::Tree) => (shards, "all-to-all", &op.reads, 1),
            (OpKind::AllReduceReplicas { .. }, Reduction::Native) => (replicas, "all-reduce", &op.writes, 1),
            (OpKind::AllReduceReplicas { .. }, Reduction::Tree) => {
                (replicas, "all-gather", &op.writes, replicas)
            }
            (OpKind::ReduceScalars, _) => {
                let scalars = Collective { kind: "all-reduce", elements: len(&op.writes[0]) };
                found.push(scalars);
                continue;
            }
            (other, _) => {
                assert!(!other.is_collective(), "{} is in no case", other.name());
                continue;
            }
        };
        if group > 1 {
            found.extend(buffers.iter().map(|buffer| Collective { kind, elements: factor * len(buffer) }));
        }
    }
    found
}

/// What XLA leaves of a program.
fn compiled(target: &Target, program: &Program) -> Optimized {
    target.compile(program).unwrap().optimized.expect("this compiler shows what it has made")
}

#[test]
fn the_program_of_a_step_has_the_collectives_of_its_schedule_in_their_order() {
    for case in CASES {
        let (plan, program) = written(case);
        assert_eq!(program.collectives, scheduled(&plan, case.2.reduction), "{case:?}");
    }
}

/// By how many places what is found is away from where it was written, at most; none if it is not the same.
fn moved(written: &[usize], found: &[usize]) -> Option<usize> {
    let mut places: BTreeMap<usize, VecDeque<usize>> = BTreeMap::new();
    for (place, elements) in written.iter().enumerate() {
        places.entry(*elements).or_default().push_back(place);
    }
    let mut most = 0;
    for (place, elements) in found.iter().enumerate() {
        most = most.max(places.get_mut(elements)?.pop_front()?.abs_diff(place));
    }
    (written.len() == found.len()).then_some(most)
}

/// Of each kind the collectives are those of the schedule: none is merged with another one, added or left out. Among their
/// kind they are where the schedule has them but for the segments of one unit, between which there is no order. Kinds are on
/// queues of their own, between which only waits are an order. Sums over replicas XLA joins.
#[test]
fn xla_leaves_all_collectives_of_a_schedule_where_they_are() {
    let Some(plugin) = plugin() else { return };
    let target = Target::open(&plugin, "cpu:4", Vec::new()).unwrap();
    for case in CASES {
        let (plan, program) = written(case);
        let found = compiled(&target, &program);
        let segments = plan.layout.units.iter().map(|unit| unit.segments.len()).max().unwrap();
        for kind in Collective::KINDS {
            let of = |all: &[Collective]| -> Vec<usize> {
                all.iter().filter(|one| one.kind == kind).map(|one| one.elements).collect()
            };
            let (ours, left) = (of(&program.collectives), of(&found.collectives));
            if kind == "all-reduce" {
                let sum = |all: &[usize]| all.iter().sum::<usize>();
                assert_eq!((sum(&left), left.last()), (sum(&ours), ours.last()), "{case:?}");
            } else {
                let most = moved(&ours, &left);
                assert!(
                    most.is_some_and(|most| most <= segments),
                    "{case:?}, {kind}: {ours:?} became {left:?}"
                );
            }
        }
        assert_eq!(
            found.products, program.products,
            "{case:?}: nothing is computed once that was to be computed twice"
        );
    }
}

#[test]
fn what_has_moved_or_gone_is_noticed() {
    assert_eq!(moved(&[1, 2, 1, 3], &[1, 2, 1, 3]), Some(0));
    assert_eq!(moved(&[1, 2, 1, 3], &[1, 1, 2, 3]), Some(1));
    assert_eq!(moved(&[1, 2, 1, 3], &[3, 1, 2, 1]), Some(3));
    assert_eq!(moved(&[1, 2, 1, 3], &[1, 2, 3]), None);
    assert_eq!(moved(&[1, 2, 1, 3], &[1, 2, 2, 3]), None);
    assert_eq!(moved(&[1, 2], &[1, 2, 2]), None);
}

/// The text of a program whose barriers are gone: what was behind one is what it was made of.
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

/// A line in which some values have other names.
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

/// Without barriers XLA would notice that later gathers make what earlier ones have made, and that layers are recomputed.
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
