//! Ranks that write, fail, hang and never come, without files.

use std::sync::Barrier;
use std::thread;

use super::*;

const LONG: Duration = Duration::from_secs(600);

fn failure(rank: usize) -> TrainError {
    TrainError::SaveThread { source: std::io::Error::other(format!("the disk of rank {rank} is full")) }
}

fn saved() -> Saved {
    Saved { step: 7, path: "checkpoints/step-00000007".into(), bytes: 1, elapsed: Duration::ZERO }
}

/// A report as a rank makes it of its file.
fn report(dir: &std::path::Path) -> RankReport {
    use fsdp_ckpt::native::{RankSave, RunDir, SavePlan};
    let (run, plan) = (RunDir::new(dir), SavePlan::new(1, Vec::new()).unwrap());
    let _lock = run.lock().unwrap();
    RankSave::create(&run, &plan, 1, 0).unwrap().finish().unwrap()
}

#[test]
fn the_first_failure_by_rank_is_told_to_all_at_once() {
    let meeting = Meeting::new(7, 4);
    thread::scope(|scope| {
        let waiting: Vec<_> = (1..4).map(|_| scope.spawn(|| meeting.outcome())).collect();
        let dir = tempfile::tempdir().unwrap();
        for rank in [3, 0, 2, 1] {
            assert_eq!(meeting.begin(), rank == 1);
            meeting.report(
                rank,
                if rank < 2 { Ok(report(&dir.path().join(rank.to_string()))) } else { Err(failure(rank)) },
            );
        }
        // Nobody waits for the limit.
        let error = meeting.reports(LONG).unwrap_err();
        assert!(error.to_string().contains("rank 2 failed: "), "{error}");
        meeting.decide(Err(error));
        for outcome in waiting.into_iter().map(|thread| thread.join().unwrap()) {
            let told = outcome.unwrap_err().to_string();
            assert!(
                told.starts_with("the checkpoint after step 7 could not be saved: rank 2 failed"),
                "{told}"
            );
        }
    });
}

#[test]
fn ranks_that_are_late_are_named_and_the_save_ends() {
    let meeting = Meeting::new(7, 12);
    meeting.report(1, Err(failure(1)));
    let error = meeting.reports(Duration::ZERO).unwrap_err();
    let named = [0, 2, 3, 4, 5, 6, 7, 8].map(Rank);
    assert!(matches!(&error, TrainError::SaveLate { ranks, .. } if ranks == &named), "{error}");
    meeting.decide(Err(error));
    assert!(meeting.has_ended());
    // What they report later changes nothing.
    meeting.report(0, Err(failure(0)));
    assert!(matches!(meeting.outcome().unwrap_err().error, TrainError::SaveLate { .. }));
}

#[test]
fn a_save_that_some_rank_has_not_begun_ends_with_the_run_and_one_that_all_have_goes_on() {
    for all in [false, true] {
        let meeting = Meeting::new(7, 2);
        meeting.begin();
        if all {
            meeting.begin();
        }
        meeting.abandon_unless_all_begun();
        assert_eq!(meeting.has_ended(), !all);
        meeting.decide(Ok(saved()));
        assert_eq!(meeting.outcome().is_ok(), all);
    }
}

#[test]
fn whoever_waits_for_reports_is_woken_when_the_run_ends() {
    let (meeting, barrier) = (Meeting::new(7, 2), Barrier::new(2));
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            barrier.wait();
            meeting.reports(LONG)
        });
        barrier.wait();
        meeting.abandon_unless_all_begun();
        assert!(matches!(waiting.join().unwrap().unwrap_err(), TrainError::SaveAbandoned));
    });
}

#[test]
fn what_is_decided_stays() {
    let meeting = Meeting::new(7, 1);
    meeting.decide(Ok(saved()));
    meeting.decide(Err(failure(0)));
    assert_eq!(meeting.outcome().unwrap(), saved());
}
