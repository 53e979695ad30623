//! A host that issues each step before it reads the report of the previous one, as for devices with their own queues.

use fsdp_comm::launch::{Launcher, Seat};
use fsdp_core::Rank;
use fsdp_core::engine::{ProgramOrder, StepReport};
use fsdp_nn::HostMemory;
use fsdp_train::{RankTrainer, TrainError};

use crate::runs::{shards, state, train};
use crate::support::{LLAMA, config, job, threads};

type Ranks<T> = Vec<(Vec<StepReport>, T)>;

#[test]
fn late_report_reading_does_not_change_results() {
    let dir = tempfile::tempdir().unwrap();
    let job = job(LLAMA, config(dir.path(), 61, &[]));
    let ranks: Ranks<_> = threads()
        .launch(4, &|seat: Seat<HostMemory>| {
            let mut trainer = RankTrainer::new(&job, seat)?;
            let mut reports = Vec::new();
            for step in 0..4 {
                trainer.issue(step, false, &mut ProgramOrder, &mut ())?;
                if step > 0 {
                    reports.extend(trainer.report()?);
                }
            }
            reports.extend(trainer.report()?);
            assert_eq!(trainer.unread(), 0);
            assert!(reports.iter().map(|(step, _)| *step).eq(0..4));
            Ok((reports.into_iter().map(|(_, report)| report).collect(), shards(&trainer)?))
        })
        .unwrap_or_else(|failure: fsdp_comm::launch::LaunchFailure<TrainError>| panic!("{failure:?}"));
    let in_turn = train(&[job], &threads(), 4, |_: Rank| Box::new(ProgramOrder)).unwrap();
    for (late, in_turn) in ranks.iter().zip(&in_turn) {
        assert_eq!(late.0, in_turn.reports);
        assert_eq!(late.1, in_turn.shards);
    }
}

#[test]
fn step_issued_after_non_finite_step_updates_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let overrides = ["train.optimizer.lr=1e30", "train.grad_clip=none"];
    let job = job(LLAMA, config(dir.path(), 61, &overrides));
    threads()
        .launch(4, &|seat: Seat<HostMemory>| {
            let mut trainer = RankTrainer::new(&job, seat)?;
            trainer.step(0, false, &mut ProgramOrder, &mut ())?;
            let before = state(&trainer)?;
            trainer.issue(1, false, &mut ProgramOrder, &mut ())?;
            trainer.issue(2, false, &mut ProgramOrder, &mut ())?;
            let failure = trainer.report().unwrap_err();
            assert!(matches!(failure, TrainError::NotFinite { step: 2, .. }), "{failure}");
            assert_eq!(state(&trainer)?, before);
            Ok(())
        })
        .unwrap_or_else(|failure: fsdp_comm::launch::LaunchFailure<TrainError>| panic!("{failure:?}"));
}
