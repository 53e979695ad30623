//! Ranks that write, fail, hang or never arrive, without files.

use std::thread;

use fsdp_ckpt::native::{RankSave, RunDir, SavePlan};
use fsdp_comm::assembly::InMemoryAssembly;

use super::*;

const LONG: Duration = Duration::from_secs(600);

fn failure(rank: usize) -> TrainError {
    TrainError::no_thread("x", &std::io::Error::other(format!("the disk of rank {rank} is full")))
}

fn world(ranks: usize) -> Arc<dyn Assembly> {
    Arc::new(InMemoryAssembly::new(ranks))
}

fn begin(assembly: &Arc<dyn Assembly>, rank: usize) -> SaveCoordination {
    SaveCoordination::begin(assembly, 0, rank, assembly.world()).unwrap()
}

/// A report as a rank creates it for its file.
fn report(dir: &std::path::Path) -> RankReport {
    let (run, plan) = (RunDir::new(dir), SavePlan::new(1, Vec::new()).unwrap());
    let lock = run.lock().unwrap();
    RankSave::create(&run, lock.attempt(), &plan, 1, 0).unwrap().finish().unwrap()
}

#[test]
fn reports_are_returned_unchanged_in_rank_order() {
    let (assembly, dir) = (world(3), tempfile::tempdir().unwrap());
    let reports: Vec<_> = (0..3).map(|rank| report(&dir.path().join(rank.to_string()))).collect();
    let coordinations: Vec<_> = (0..3).map(|rank| begin(&assembly, rank)).collect();
    for rank in [2, 0, 1] {
        coordinations[rank].report(Ok(reports[rank].clone()));
    }
    assert_eq!(coordinations[0].reports(LONG).unwrap(), reports);
}

#[test]
fn lowest_failed_rank_is_reported_without_waiting() {
    let (assembly, dir) = (world(4), tempfile::tempdir().unwrap());
    for rank in [3, 0, 2, 1] {
        let ok = || Ok(report(&dir.path().join(rank.to_string())));
        begin(&assembly, rank).report(if rank < 2 { ok() } else { Err(failure(rank)) });
    }
    // This does not wait for the limit.
    let error = begin(&assembly, 0).reports(LONG).unwrap_err();
    assert!(matches!(error, TrainError::RankFailed { rank: Rank(2), .. }), "{error}");
    assert_eq!(error.kind(), failure(2).kind());
    assert!(error.to_string().contains("the disk of rank 2 is full"), "{error}");
}

#[test]
fn late_ranks_are_named() {
    let assembly = world(12);
    begin(&assembly, 1).report(Err(failure(1)));
    let error = begin(&assembly, 0).reports(Duration::ZERO).unwrap_err();
    assert!(error.to_string().starts_with("ranks 0, 2, 3, 4, 5, 6, 7, 8 did not write"), "{error}");
}

#[test]
fn save_is_abandoned_unless_all_ranks_have_begun() {
    let dir = tempfile::tempdir().unwrap();
    let report = report(dir.path());
    for all in [false, true] {
        let assembly = world(2);
        let coordination = begin(&assembly, 0);
        let other = all.then(|| begin(&assembly, 1));
        coordination.report(Ok(report.clone()));
        thread::scope(|scope| {
            let waiting = scope.spawn(|| coordination.reports(LONG));
            coordination.abandon_unless_all_begun();
            if let Some(other) = other {
                other.report(Ok(report.clone()));
            }
            match waiting.join().unwrap() {
                Ok(reports) => assert!(all && reports.len() == 2),
                Err(error) => assert!(!all && matches!(error, TrainError::SaveUnfinished(_)), "{error}"),
            }
        });
    }
}

#[test]
fn panicked_rank_is_not_awaited() {
    let assembly = world(2);
    let first = begin(&assembly, 0);
    first.report(Err(failure(0)));
    let panicked = thread::scope(|scope| {
        let other = scope.spawn(|| {
            let _coordination = begin(&assembly, 1);
            panic!("a bug of ours");
        });
        other.join().is_err()
    });
    assert!(panicked);
    assert!(first.reports(LONG).unwrap_err().to_string().contains("rank 0"));
}
