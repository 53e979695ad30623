use fsdp_core::comm::Purpose;
use fsdp_core::program::Pass;
use fsdp_core::schedule::{BufferId, Lasting, Op, OpKind, Round, Section, SectionKind, Source};
use fsdp_core::wrap::UnitId;
use fsdp_core::{Group, Mesh};
use proptest::prelude::*;

use super::*;

/// A schedule of operations that have only queues and waits.
fn schedule(ops: &[(Queue, &[usize])]) -> Schedule {
    let kind = |queue: Queue| match queue {
        Queue::Compute => OpKind::BeginMicroBatch(Round(0)),
        Queue::Gather => OpKind::AllGather {
            unit: UnitId(0),
            source: Source::Shard,
            group: Group::SHARDS,
            purpose: Purpose::Forward,
        },
        Queue::Reduce => OpKind::ReduceScalars,
        Queue::Upload => OpKind::Upload(UnitId(0)),
        Queue::Download => OpKind::Download(UnitId(0)),
    };
    let op = |&(queue, waits): &(Queue, &[usize])| Op {
        kind: kind(queue),
        reads: Vec::new(),
        writes: Vec::new(),
        waits: waits.iter().map(|&wait| OpId(wait)).collect(),
        joins: Vec::new(),
    };
    Schedule {
        buffers: Vec::new(),
        lasting: Lasting {
            units: Vec::new(),
            scalars: BufferId(0),
            spare_scalars: BufferId(0),
            factors: BufferId(0),
            not_finite: BufferId(0),
            statistics: Vec::new(),
            scratch: None,
        },
        ops: ops.iter().map(op).collect(),
        sections: vec![Section { kind: SectionKind::Prologue, start: 0, end: ops.len() }],
        pass: Pass::Evaluate,
        rounds: 1,
        mesh: Mesh::new([]).unwrap(),
        chunks: 1,
        averaged_ranks: 1,
    }
}

fn takes(seconds: f64) -> Work {
    Work { seconds, ..Work::default() }
}

const C: Queue = Queue::Compute;
const G: Queue = Queue::Gather;
const R: Queue = Queue::Reduce;

#[test]
fn operation_starts_when_last_dependency_ends() {
    let ops: [(Queue, &[usize]); 5] = [(G, &[]), (C, &[0]), (G, &[]), (C, &[2]), (R, &[3])];
    let schedule = schedule(&ops);
    let timeline = simulate(&schedule, &[2.0, 1.0, 3.0, 4.0, 0.5].map(takes), Pace::default());
    let spans: Vec<(f64, f64)> = timeline.spans.iter().map(|span| (span.start, span.end)).collect();
    assert_eq!(spans, [(0.0, 2.0), (2.0, 3.0), (2.0, 5.0), (5.0, 9.0), (9.0, 9.5)]);
    assert_eq!(timeline.end, 9.5);
    assert_eq!(timeline.critical_path(), [0, 2, 3, 4].map(OpId));
    let exposed: Vec<(usize, f64)> =
        timeline.exposed(&schedule).iter().map(|(op, time)| (op.0, *time)).collect();
    assert_eq!(exposed, [(0, 2.0), (2, 2.0), (4, 0.5)]);
    assert_eq!(timeline.busy(&schedule, C), 5.0);
}

#[test]
fn collectives_share_links_and_slow_computation() {
    let both = schedule(&[(G, &[]), (R, &[])]);
    let on = |link| Work { seconds: 2.0, link: Some(link), drag: 0.0 };
    assert_eq!(simulate(&both, &[on(0), on(1)], Pace::default()).end, 2.0);
    assert_eq!(simulate(&both, &[on(0), on(0)], Pace::default()).end, 4.0);
    // While the collective runs, for 2 of the 3 seconds, a quarter of the computation is lost.
    let beside = schedule(&[(G, &[]), (C, &[])]);
    let collective = Work { seconds: 2.0, link: Some(0), drag: 0.25 };
    assert_eq!(simulate(&beside, &[collective, takes(3.0)], Pace::default()).end, 3.5);
}

#[test]
fn host_issues_operations_one_at_a_time() {
    let apart = schedule(&[(G, &[]), (C, &[]), (R, &[])]);
    let pace = Pace { issue_seconds: 0.5, is_serial: false };
    let timeline = simulate(&apart, &[0.25; 3].map(takes), pace);
    assert_eq!(timeline.spans.iter().map(|span| span.start).collect::<Vec<_>>(), [0.5, 1.0, 1.5]);
    let pace = Pace { issue_seconds: 0.5, is_serial: true };
    assert_eq!(simulate(&apart, &[0.25; 3].map(takes), pace).end, 2.25);
}

#[test]
#[should_panic(expected = "operations wait for each other")]
fn cyclic_waits_panic() {
    simulate(&schedule(&[(C, &[1]), (G, &[0])]), &[1.0; 2].map(takes), Pace::default());
}

#[test]
fn straggling_matches_expected_normal_maximum() {
    assert_eq!(straggling(1, 0.1), 1.0);
    // Expected largest of n standard normal values: Harter (1961).
    for (n, expected) in [(2, 0.56419), (10, 1.53875), (100, 2.50759), (400, 2.96818)] {
        assert!((straggling(n, 1.0) - 1.0 - expected).abs() < 0.03, "{n}: {}", straggling(n, 1.0));
    }
}

proptest! {
    /// Without links and drag, an operation begins at the latest end of its waits and of the operation before it on its
    /// queue: a recursion in program order.
    #[test]
    fn times_without_sharing_match_recursion(
        drawn in prop::collection::vec((0usize..5, 0u32..100, prop::collection::vec(0usize..1000, 0..3)), 1..60),
    ) {
        let waits: Vec<Vec<usize>> = drawn.iter().enumerate()
            .map(|(op, (.., waits))| if op == 0 { Vec::new() } else { waits.iter().map(|wait| wait % op).collect() })
            .collect();
        let ops: Vec<(Queue, &[usize])> =
            drawn.iter().zip(&waits).map(|((queue, ..), waits)| (Queue::ALL[*queue], &waits[..])).collect();
        let schedule = schedule(&ops);
        let work: Vec<Work> = drawn.iter().map(|(_, seconds, _)| takes(f64::from(*seconds))).collect();
        let timeline = simulate(&schedule, &work, Pace::default());
        let mut ends: Vec<f64> = Vec::new();
        for (op, (queue, waits)) in ops.iter().enumerate() {
            let before = (0..op).rev().find(|&other| ops[other].0 == *queue);
            let start = waits.iter().copied().chain(before).map(|other| ends[other]).fold(0.0, f64::max);
            ends.push(start + work[op].seconds);
            prop_assert_eq!((timeline.spans[op].start, timeline.spans[op].end), (start, ends[op]));
        }
        // The path has no gaps, and ends at the end of the step.
        let path = timeline.critical_path();
        prop_assert!(path.windows(2).all(|pair| timeline.spans[pair[1].0].start == timeline.spans[pair[0].0].end));
        prop_assert_eq!(timeline.spans[path.last().unwrap().0].end, timeline.end);
    }
}
