//! Exchanges that do not complete, and worlds that must not be finalized.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use fsdp_comm::{Alarm, Exchanged};
use fsdp_core::comm::CommError;
use fsdp_core::{FailureKind, Rank};
use fsdp_mpi::{Family, MpiError};

use crate::exchanges::{both, pattern, receive, send};
use crate::fake::{LONG, Worlds};

const SHORT_TIME: Duration = Duration::from_millis(500);
const LONG_MESSAGE: usize = 1 << 20;

fn aborted() -> CommError {
    CommError::Aborted { rank: Rank(1), reason: "enough".to_owned(), kind: FailureKind::Temporary }
}

#[test]
fn missing_rank_is_reported_as_late() {
    let worlds = Worlds::new(Family::Mpich, 3, SHORT_TIME);
    let mut link = worlds.link(0, 0);
    assert_eq!(receive(&mut *link, 1, &mut [0; 4]), Ok(Exchanged::Late { peer: 1 }));
    assert_eq!(send(&mut *link, 2, &pattern(0, LONG_MESSAGE)), Ok(Exchanged::Late { peer: 2 }));
}

#[test]
fn alarm_ends_pending_and_later_exchanges() {
    let worlds = Worlds::new(Family::OpenMpi, 2, LONG);
    let data = pattern(0, LONG_MESSAGE);
    thread::scope(|scope| {
        let waiting = [
            scope.spawn(|| receive(&mut *worlds.link(0, 0), 1, &mut [0; 4])),
            scope.spawn(|| receive(&mut *worlds.link(1, 0), 1, &mut vec![0; LONG_MESSAGE])),
            scope.spawn(|| send(&mut *worlds.link(2, 0), 1, &data)),
        ];
        worlds.alarm.raise(aborted());
        for waiting in waiting {
            assert_eq!(waiting.join().unwrap(), Err(aborted()));
        }
    });
    assert_eq!(send(&mut *worlds.link(3, 0), 1, &[1]), Err(aborted()));
}

#[test]
fn exchange_does_not_return_while_mpi_uses_its_buffers() {
    let worlds = Worlds::new(Family::Mpich, 2, LONG);
    worlds.hold(true);
    let data = pattern(0, LONG_MESSAGE);
    let has_returned = AtomicBool::new(false);
    thread::scope(|scope| {
        let run = |rank: usize| {
            let mut link = worlds.link(0, rank);
            let mut got = vec![0; LONG_MESSAGE];
            let outcome =
                if rank == 0 { send(&mut *link, 1, &data) } else { receive(&mut *link, 0, &mut got) };
            has_returned.store(true, Ordering::SeqCst);
            (outcome, got)
        };
        let (sender, receiver) = (scope.spawn(move || run(0)), scope.spawn(move || run(1)));
        while worlds.moving() == 0 {
            thread::yield_now();
        }
        worlds.alarm.raise(aborted());
        // A refused exchange shows that the alarm was seen, so a rank that returns too early would have returned by
        // now.
        for rank in [0, 1] {
            assert_eq!(receive(&mut *worlds.link(1, rank), 1 - rank, &mut [0]), Err(aborted()));
        }
        assert!(!has_returned.load(Ordering::SeqCst), "the message is still on its way");
        worlds.hold(false);
        assert_eq!(sender.join().unwrap().0, Err(aborted()));
        let (outcome, got) = receiver.join().unwrap();
        assert_eq!(outcome, Err(aborted()));
        assert!(got == data, "what was on its way has come to its end");
    });
}

#[test]
fn alarm_ends_receive_whose_data_never_arrives() {
    let worlds = Worlds::new(Family::Standard, 2, LONG);
    worlds.deafen();
    let data = pattern(0, LONG_MESSAGE);
    let mut got = vec![0; LONG_MESSAGE];
    thread::scope(|scope| {
        scope.spawn(|| {
            while worlds.empty() == 0 {
                thread::yield_now();
            }
            worlds.alarm.raise(aborted());
        });
        let outcomes = both(&worlds, |link| send(link, 1, &data), |link| receive(link, 0, &mut got));
        assert_eq!(outcomes, (Err(aborted()), Err(aborted())));
    });
}

#[test]
fn mpi_error_text_is_reported() {
    let worlds = Worlds::new(Family::OpenMpi, 2, LONG);
    worlds.fail_call(1);
    let error = send(&mut *worlds.link(0, 1), 0, &[1]).unwrap_err();
    insta::assert_snapshot!(error, @"rank 1: transport: MPI_Isend: error 66: the fake's error 66");

    worlds.fail_message(1);
    let data = pattern(0, LONG_MESSAGE);
    let mut got = vec![0; LONG_MESSAGE];
    let (sent, received) = both(&worlds, |link| send(link, 1, &data), |link| receive(link, 0, &mut got));
    assert_eq!(sent, Ok(Exchanged::Done));
    insta::assert_snapshot!(received.unwrap_err(), @"rank 1: transport: MPI_Test: error 77: the fake's error 77");
}

#[test]
fn world_is_finalized_after_all_messages_complete() {
    let mut worlds = Worlds::new(Family::OpenMpi, 2, LONG);
    assert_eq!(send(&mut *worlds.link(0, 0), 1, &pattern(0, 10_000)), Ok(Exchanged::Done));
    let mut got = vec![0; 10_000];
    assert_eq!(receive(&mut *worlds.link(0, 1), 0, &mut got), Ok(Exchanged::Done));
    for rank in worlds.ranks.drain(..) {
        rank.finalize().unwrap();
    }
    assert_eq!(worlds.finalized(), 2);
}

#[test]
fn failed_or_unfinished_world_is_not_finalized() {
    let mut worlds = Worlds::new(Family::Mpich, 2, SHORT_TIME);
    assert_eq!(send(&mut *worlds.link(0, 0), 1, &pattern(0, 10_000)), Ok(Exchanged::Done));
    let second = worlds.ranks.pop().unwrap();
    let error = worlds.ranks.pop().unwrap().finalize().unwrap_err();
    assert!(matches!(error, MpiError::Unfinished { messages: 1, .. }), "{error}");
    worlds.alarm.raise(aborted());
    let error = second.finalize().unwrap_err();
    insta::assert_snapshot!(error, @"MPI is not finalized after a failure: the communicator was aborted on rank 1: enough");
    drop(Worlds::new(Family::Mpich, 2, SHORT_TIME));
    assert_eq!(worlds.finalized(), 0);
}

#[test]
fn channel_beyond_mpi_tags_is_rejected() {
    let worlds = Worlds::new(Family::Mpich, 2, LONG);
    let mut last = worlds.link(16_383, 0);
    assert_eq!(send(&mut *last, 1, &[1]), Ok(Exchanged::Done));
    let mut beyond = last.subgroup([Rank(0), Rank(1)].into(), last.unused_channel());
    let error = send(&mut *beyond, 1, &[1]).unwrap_err();
    insta::assert_snapshot!(error, @"rank 0: transport: channel 16384 is beyond the 16384 that MPI has tags for: make fewer groups");
}
