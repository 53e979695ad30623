//! A rank that fails in the middle of training: the errors name it, and no rank hangs.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use fsdp_comm::launch::{FailureReason, LaunchFailure, Launcher, Seat};
use fsdp_core::comm::CommError;
use fsdp_core::engine::ProgramOrder;
use fsdp_core::{Error, Rank};
use fsdp_nn::Backend;
use fsdp_nn::hf::HfModel;
use fsdp_nn::model::{Architecture, Mlp};
use fsdp_sim::{Action, Fault, Faults};
use fsdp_train::{Job, RankTrainer, TrainError};

use crate::expert_axis;
use crate::planted::{self, Deed};
use crate::support::{SOON, config, job, job_of, options, threads_with};

/// How a world ended: the failure, and the error (if any) of every rank that returned.
struct End {
    failure: LaunchFailure<TrainError>,
    errors: Vec<(Rank, Option<String>)>,
}

/// Trains with one job per rank, and checks that training fails soon or not at all. (The time limit of a world is
/// longer than what is allowed here: no failure may depend on it.)
fn end<A: Architecture + Clone>(jobs: &[Job<A>], steps: u64, faults: Vec<Fault>) -> Option<End> {
    let mut options = options();
    options.intercept = Some(Arc::new(Faults::new(faults)));
    end_on(&threads_with(options), jobs, steps)
}

/// Like [`end`], with ranks of the given launcher.
fn end_on<L, A>(launcher: &L, jobs: &[Job<A>], steps: u64) -> Option<End>
where
    L: Launcher,
    L::Memory: Backend,
    A: Architecture + Clone,
{
    let errors = Mutex::new(Vec::new());
    let start = Instant::now();
    let failure = launcher
        .launch(jobs.len(), &|seat: Seat<L::Memory>| {
            let rank = seat.rank;
            let result = RankTrainer::new(&jobs[rank.0], seat).and_then(|mut trainer| {
                (0..steps)
                    .try_for_each(|step| trainer.step(step, false, &mut ProgramOrder, &mut ()).map(drop))
            });
            errors.lock().unwrap().push((rank, result.as_ref().err().map(ToString::to_string)));
            result
        })
        .err();
    assert!(start.elapsed() < SOON, "took {:?}", start.elapsed());
    let mut errors = errors.into_inner().unwrap();
    errors.sort();
    failure.map(|failure| End { failure, errors })
}

fn mlp() -> Mlp {
    Mlp::new(&planted::mlp()).unwrap()
}

fn jobs<A: Architecture + Clone>(ranks: usize, model: impl Fn(usize) -> A) -> Vec<Job<A>> {
    let dir = tempfile::tempdir().unwrap();
    let overrides = [
        "fsdp.wrap=[\"MlpLayer\"]",
        "train.global_batch_size=24",
        &format!("run.ranks={ranks}"),
        &format!("fsdp.mesh={{ replicate = {} }}", if ranks == 4 { 2 } else { 1 }),
    ];
    (0..ranks).map(|rank| job_of(model(rank), config(dir.path(), 7, &overrides))).collect()
}

/// Returns the ranks that the failure of a launch names.
fn accused(failure: &LaunchFailure<TrainError>) -> Vec<Rank> {
    let of_comm = |error: &CommError| match error {
        CommError::Mismatch { rank, peer, .. } => vec![*rank, *peer],
        CommError::PeerFailed { rank, .. } | CommError::Transport { rank, .. } => vec![*rank],
        CommError::Missing { missing, .. } => missing.to_vec(),
        other => panic!("an unexpected kind of failure: {other}"),
    };
    match &failure.reason {
        FailureReason::Error(TrainError::Core(Error::Comm(error))) | FailureReason::Comm(error) => {
            of_comm(error)
        }
        FailureReason::Panic(message) => {
            assert!(message.contains("injected fault"), "{message}");
            vec![failure.rank]
        }
        other => panic!("an unexpected reason: {other:?}"),
    }
}

/// Jobs of a mixture whose ranks share samples and experts: within blocks there are collectives of both axes.
fn mixtures() -> Vec<Job<HfModel>> {
    let dir = tempfile::tempdir().unwrap();
    let overrides = [
        "fsdp.min_num_params=500",
        "data.seq_len=4",
        "train.micro_batch_size=1",
        "train.global_batch_size=4",
        "train.router_aux_loss_coef=0.1",
        "run.ranks=4",
        "fsdp.mesh={ context = 2, expert = 2 }",
    ];
    let one = |_| job(&expert_axis::model("qwen3_moe"), config(dir.path(), 61, &overrides));
    (0..4).map(one).collect()
}

/// Lets every rank fail at each of its collectives: those of connecting and of two steps.
fn check(action: Action) {
    for ranks in [2, 3, 4] {
        fail_everywhere(&jobs(ranks, |_| mlp()), action);
    }
    fail_everywhere(&mixtures(), action);
}

fn fail_everywhere<A: Architecture + Clone>(jobs: &[Job<A>], action: Action) {
    let ranks = jobs.len();
    for culprit in (0..ranks).map(Rank) {
        let fails = |&nth: &u64| {
            let fault = Fault { rank: culprit, nth, action };
            let end = end(jobs, 2, vec![fault]);
            end.map(|end| named(fault, ranks, end)).is_some()
        };
        assert!((0..).take_while(fails).count() > 20, "{ranks}");
    }
}

/// Checks that the failure and the errors of all other ranks name the culprit.
fn named(fault: Fault, ranks: usize, End { failure, errors }: End) {
    let (culprit, action) = (fault.rank, fault.action);
    let at = format!("{fault:?} of {ranks} ranks");
    assert!(accused(&failure).contains(&culprit), "{at}: {failure:?}");
    if !matches!(action, Action::WrongCollective | Action::WrongLength) {
        assert_eq!(failure.rank, culprit, "{at}: {failure:?}");
    }
    // A rank that panicked returned nothing; every other one returned an error that names the culprit.
    let panicked = usize::from(action == Action::Panic);
    assert_eq!(errors.len(), ranks - panicked, "{at}: {errors:?}");
    for (rank, error) in errors {
        let error = error.unwrap_or_else(|| panic!("{at}: {rank} trained on"));
        assert!(error.contains(&culprit.to_string()), "{at}: {rank} reports `{error}`");
    }
}

#[test]
fn rank_with_failed_collective_is_named_by_all() {
    check(Action::Error);
}

#[test]
fn panicking_rank_is_named_by_all() {
    check(Action::Panic);
}

#[test]
fn rank_with_wrong_collective_is_named_by_all() {
    check(Action::WrongCollective);
}

#[test]
fn rank_with_wrong_length_is_named_by_all() {
    check(Action::WrongLength);
}

#[test]
fn rank_that_never_arrives_is_named_by_all() {
    check(Action::Never);
}

#[test]
fn block_error_is_reported_as_root_cause() {
    for (ranks, culprit) in [(2, 1), (3, 0), (4, 2)] {
        for (block, name) in ["embedding", "layers.0", "layers.1", "head"].into_iter().enumerate() {
            for call in [0, 1, 7] {
                let deed = move |rank| if rank == culprit { Deed::FailAt(call) } else { Deed::Nothing };
                let launcher = planted::ranks(options(), block, deed);
                let End { failure, errors } = end_on(&launcher, &jobs(ranks, |_| mlp()), 4).unwrap();
                assert_eq!(failure.rank, Rank(culprit));
                let FailureReason::Error(TrainError::Core(Error::Program { block, .. })) = &failure.reason
                else {
                    panic!("{:?}", failure.reason)
                };
                assert_eq!(block, name);
                assert_eq!(errors.len(), ranks);
                for (rank, error) in errors {
                    let error = error.unwrap();
                    let names = rank.0 == culprit || error.contains(&format!("rank {culprit}"));
                    assert!(names && error.contains(&format!("block `{name}`")), "{rank}: {error}");
                    assert!(!error.contains("given up"), "{rank}: {error}");
                }
            }
        }
    }
}

#[test]
fn block_panic_is_reported_as_root_cause() {
    for ranks in [2, 3, 4] {
        let deed = |rank| if rank == 1 { Deed::PanicAt(4) } else { Deed::Nothing };
        let launcher = planted::ranks(options(), 2, deed);
        let End { failure, errors } = end_on(&launcher, &jobs(ranks, |_| mlp()), 4).unwrap();
        assert_eq!(failure.rank, Rank(1));
        assert!(matches!(&failure.reason, FailureReason::Panic(message) if message == "planted panic"));
        assert_eq!(errors.len(), ranks - 1);
        for (rank, error) in errors {
            let error = error.unwrap();
            assert!(error.contains("rank 1") && error.contains("planted panic"), "{rank}: {error}");
        }
    }
}
