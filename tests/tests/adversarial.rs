//! Schedules with a planted error: the checker rejects them, and if run anyway, the error is caught or harmless.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use fsdp_comm::launch::{FailureReason, LaunchFailure};
use fsdp_core::checker::{self, Violation};
use fsdp_core::comm::CommError;
use fsdp_core::engine::{IssueOrder, ProgramOrder};
use fsdp_core::plan::Plan;
use fsdp_core::schedule::{OpKind, Schedule};
use fsdp_core::{Error, Rank};
use fsdp_nn::model::{Mlp, MlpConfig};
use fsdp_sim::SeededOrder;
use fsdp_train::{Job, TrainError};

use crate::runs::{RankOutcome, train};
use crate::support::{SOON, config, job_of, threads};

const RANKS: usize = 2;

/// Three units: the root with embedding and head, and two layers of different sizes.
fn job(rounds: usize, overrides: &[&str]) -> Job<Mlp> {
    let dir = tempfile::tempdir().unwrap();
    let sizes = MlpConfig { vocab: 7, widths: vec![3, 5, 4], bias: true, tied: false, std: 0.5 };
    let batch = format!("train.global_batch_size={}", RANKS * rounds);
    let mut all = vec!["run.ranks=2", "train.micro_batch_size=1", "fsdp.wrap=[\"MlpLayer\"]", &*batch];
    all.extend(overrides);
    job_of(Mlp::new(&sizes).unwrap(), config(dir.path(), 7, &all))
}

/// The policies whose schedules are tampered with: micro-batches per rank, and overrides.
const POLICIES: [(usize, &[&str]); 11] = [
    (1, &[]),
    (2, &[]),
    (2, &["fsdp.forward_prefetch=2", "fsdp.backward_prefetch=0"]),
    (2, &["fsdp.accumulation=\"unsharded\"", "fsdp.reshard_after_forward=false"]),
    (2, &["fsdp.mesh={ replicate = 2 }", "fsdp.param_dtype=\"bf16\""]),
    (1, &["fsdp.frozen=[\"layers.0\"]", "fsdp.activation_checkpointing=\"full\""]),
    (1, &["fsdp.activation_checkpointing=\"selective\""]),
    (1, &["fsdp.offload=\"cpu\""]),
    (2, &["fsdp.offload=\"cpu\"", "fsdp.forward_prefetch=2", "fsdp.param_dtype=\"bf16\""]),
    (1, &["fsdp.offload=\"cpu\"", "fsdp.mesh={ replicate = 2 }"]),
    (1, &["train.optimizer={ name = \"adafactor\" }"]),
];

fn tampered(job: &Job<Mlp>, edit: impl FnOnce(&mut Schedule)) -> Job<Mlp> {
    let mut job = job.clone();
    let plan: &mut Plan = Arc::make_mut(&mut job.plan);
    edit(&mut plan.step);
    job
}

fn violation(job: &Job<Mlp>) -> Result<(), Violation> {
    checker::check(&job.plan.step, &job.plan.spec, &job.plan.layout)
}

type Outcome = Result<Vec<RankOutcome>, LaunchFailure<TrainError>>;

fn run(jobs: &[Job<Mlp>], seed: Option<u64>) -> Outcome {
    let order = |rank: Rank| -> Box<dyn IssueOrder> {
        match seed {
            Some(seed) => Box::new(SeededOrder::for_rank(seed, rank.0)),
            None => Box::new(ProgramOrder),
        }
    };
    train(jobs, &threads(), 2, order)
}

/// Whether a run had the same reports and shards as the untampered one.
fn is_same(outcome: &Outcome, expected: &[RankOutcome]) -> bool {
    outcome.as_ref().is_ok_and(|ranks| {
        ranks.iter().zip(expected).all(|(got, want)| got.reports == want.reports && got.shards == want.shards)
    })
}

/// Returns all schedules with one wait or one join removed, with a description of what was removed.
fn without_one(job: &Job<Mlp>) -> Vec<(String, Job<Mlp>)> {
    let mut all = Vec::new();
    for (index, op) in job.plan.step.ops.iter().enumerate() {
        for (what, count) in [("wait", op.waits.len()), ("join", op.joins.len())] {
            for place in 0..count {
                let (kind, target) =
                    (op.kind, if what == "wait" { op.waits[place] } else { op.joins[place] });
                let job = tampered(job, |schedule| {
                    let op = &mut schedule.ops[index];
                    let list = if what == "wait" { &mut op.waits } else { &mut op.joins };
                    list.remove(place);
                });
                let of = job.plan.step.op(target).kind;
                all.push((format!("{what} of {index} {kind:?} for {} {of:?}", target.0), job));
            }
        }
    }
    all
}

#[test]
fn removing_any_wait_or_join_is_a_violation() {
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for (rounds, overrides) in POLICIES {
        let job = job(rounds, overrides);
        let expected = run(std::slice::from_ref(&job), None).unwrap();
        for (removed, job) in without_one(&job) {
            let verdict = match violation(&job) {
                Err(Violation::Race { .. }) => "race",
                Err(Violation::NotHandedOver { .. }) => "not handed over",
                Err(Violation::BadJoin { .. }) => "bad join",
                Err(other) => panic!("{overrides:?}, {removed}: an unexpected reason: {other}"),
                Ok(()) => {
                    for seed in 0..40 {
                        let outcome = run(std::slice::from_ref(&job), Some(seed));
                        assert!(is_same(&outcome, &expected), "{overrides:?}, {removed}, seed {seed}");
                    }
                    "redundant"
                }
            };
            *seen.entry(verdict).or_default() += 1;
        }
    }
    assert!(seen["race"] > 100 && seen["not handed over"] > 5, "{seen:?}");
    assert_eq!(seen.get("redundant"), None, "the compiler emits no wait that is not needed: {seen:?}");
}

/// Checks an assumption of the tests above: a missing wait shows when queues run in another order.
#[test]
fn most_missing_waits_change_results_under_some_seed() {
    let job = job(2, &[]);
    let expected = run(std::slice::from_ref(&job), None).unwrap();
    let (mut shown, mut hidden) = (0, Vec::new());
    for (removed, job) in without_one(&job).into_iter().filter(|(removed, _)| removed.starts_with("wait")) {
        let shows = (0..24).any(|seed| !is_same(&run(std::slice::from_ref(&job), Some(seed)), &expected));
        if shows { shown += 1 } else { hidden.push(removed) }
    }
    assert!(shown > hidden.len(), "{shown} shown, hidden: {hidden:#?}");
}

#[test]
fn untampered_schedule_is_bitwise_equal_under_every_seed() {
    for (rounds, overrides) in POLICIES {
        let job = job(rounds, overrides);
        let expected = run(std::slice::from_ref(&job), None).unwrap();
        for seed in 0..24 {
            let outcome = run(std::slice::from_ref(&job), Some(seed));
            assert!(is_same(&outcome, &expected), "{overrides:?}, seed {seed}: {:?}", outcome.err());
        }
    }
}

/// Runs one job per rank, and checks that the run fails soon.
fn fails(jobs: &[Job<Mlp>]) -> LaunchFailure<TrainError> {
    let start = Instant::now();
    let failure = run(jobs, None).expect_err("the ranks disagree");
    assert!(start.elapsed() < SOON, "took {:?}", start.elapsed());
    failure
}

fn indices(schedule: &Schedule, is_selected: impl Fn(&OpKind) -> bool) -> Vec<usize> {
    (0..schedule.ops.len()).filter(|&index| is_selected(&schedule.ops[index].kind)).collect()
}

/// Swaps two operations; waits and joins stay in place.
fn swap(schedule: &mut Schedule, a: usize, b: usize) {
    let [first, second] = schedule.ops.get_disjoint_mut([a, b]).unwrap();
    std::mem::swap(&mut first.kind, &mut second.kind);
    std::mem::swap(&mut first.reads, &mut second.reads);
    std::mem::swap(&mut first.writes, &mut second.writes);
}

/// Swaps two operations together with the waits and joins that refer to them.
fn swap_with_waits(schedule: &mut Schedule, a: usize, b: usize) {
    schedule.ops.swap(a, b);
    for op in &mut schedule.ops {
        for target in op.waits.iter_mut().chain(&mut op.joins) {
            if [a, b].contains(&target.0) {
                target.0 = a + b - target.0;
            }
        }
    }
}

#[test]
fn swapped_gathers_error_names_both_ranks_and_units() {
    let mut sound = 0;
    for overrides in [["fsdp.forward_prefetch=3"], ["fsdp.reshard_after_forward=false"]] {
        let plain = job(1, &overrides);
        let gathers = indices(&plain.plan.step, |kind| matches!(kind, OpKind::AllGather { .. }));
        for pair in gathers.windows(2) {
            let (a, b) = (pair[0], pair[1]);
            let jobs = [plain.clone(), tampered(&plain, |schedule| swap_with_waits(schedule, a, b))];
            let diverges = checker::check_ranks(&jobs.each_ref().map(|job| &job.plan.step));
            assert!(matches!(diverges, Err(Violation::Diverges { rank: Rank(1), .. })), "{diverges:?}");
            if violation(&jobs[1]).is_err() {
                continue;
            }
            let reason = fails(&jobs).reason;
            let FailureReason::Error(TrainError::Core(Error::Comm(CommError::Mismatch {
                rank,
                got,
                peer,
                expected,
            }))) = reason
            else {
                panic!("{a} and {b}: {reason:?}")
            };
            assert_eq!(rank.0 + peer.0, 1, "both ranks are named");
            assert!(got.unit.is_some() && expected.unit.is_some() && got.unit != expected.unit);
            sound += 1;
        }
    }
    assert!(sound >= 2, "some swaps are sound on that rank alone: {sound}");
}

#[test]
fn swapped_reductions_fail_with_mismatch_or_buffer_in_use() {
    let plain = job(1, &[]);
    let reductions = indices(&plain.plan.step, |kind| matches!(kind, OpKind::ReduceScatter { .. }));
    for pair in reductions.windows(2) {
        let jobs = [plain.clone(), tampered(&plain, |schedule| swap(schedule, pair[0], pair[1]))];
        assert!(violation(&jobs[1]).is_err());
        let LaunchFailure { rank: failed, reason } = fails(&jobs);
        let FailureReason::Error(TrainError::Core(error)) = reason else { panic!("{reason:?}") };
        match error {
            Error::BufferInUse { .. } => assert_eq!(failed, Rank(1)),
            // Which of the two is named depends on which calls first.
            Error::Comm(CommError::Mismatch { rank, peer, .. }) => assert_eq!(rank.0 + peer.0, 1),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn ranks_with_different_policies_are_rejected_without_hang() {
    let plain = job(2, &[]);
    for other in [
        ["fsdp.reshard_after_forward=false"],
        ["fsdp.accumulation=\"unsharded\""],
        ["fsdp.reduce_dtype=\"bf16\""],
        ["fsdp.frozen=[\"layers.1\"]"],
        ["fsdp.wrap=[]"],
        ["train.optimizer={ name = \"adafactor\" }"],
    ] {
        let mut jobs = [plain.clone(), job(2, &other)];
        let FailureReason::Error(TrainError::Core(Error::Comm(CommError::Differs { ranks, reference }))) =
            fails(&jobs).reason
        else {
            panic!("{other:?} is not noticed before the first step")
        };
        assert_eq!((ranks, reference), (vec![Rank(1)], Rank(0)));

        // Without the comparison of digests, they do not hang either.
        jobs[1].digest = plain.digest;
        let reason = fails(&jobs).reason;
        let typed = matches!(
            &reason,
            FailureReason::Error(TrainError::Core(Error::Comm(
                CommError::Mismatch { .. } | CommError::Missing { .. }
            ))) | FailureReason::Comm(CommError::Missing { .. })
        );
        assert!(typed, "{other:?}: {reason:?}");
    }
}

/// Tests, for every reshard, the schedule in which it comes one compute operation too early.
#[test]
fn early_reshard_is_rejected_and_never_uses_freed_storage() {
    for (rounds, overrides) in POLICIES {
        let plain = job(rounds, overrides);
        let schedule = &plain.plan.step;
        let compute = indices(schedule, |kind| kind.queue() == fsdp_core::Queue::Compute);
        let expected = run(std::slice::from_ref(&plain), None).unwrap();
        let (mut found, mut stopped) = (0, 0);
        for pair in compute.windows(2) {
            let (use_of, free) = (pair[0], pair[1]);
            let uses = schedule.ops[use_of].kind.call().is_some();
            if !uses || !matches!(schedule.ops[free].kind, OpKind::Reshard(_)) {
                continue;
            }
            found += 1;
            let early = tampered(&plain, |schedule| swap(schedule, use_of, free));
            let rejected = violation(&early);
            assert!(matches!(rejected, Err(Violation::Contents { .. })), "{overrides:?}: {rejected:?}");
            // Some backward passes do not read the values of their parameters; all others find them released.
            let outcome = run(&[early], None);
            let reason = match outcome {
                Ok(_) => {
                    assert!(is_same(&outcome, &expected), "{overrides:?}, {use_of}");
                    continue;
                }
                Err(failure) => failure.reason,
            };
            stopped += 1;
            assert!(
                matches!(&reason, FailureReason::Error(TrainError::Core(Error::Released { .. }))),
                "{overrides:?}, {use_of}: {reason:?}"
            );
        }
        assert!(found > 0 && stopped > 0, "{overrides:?}");
    }
}
