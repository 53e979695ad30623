use std::sync::Arc;
use std::thread;

use fsdp_core::DType;
use fsdp_core::comm::{CollectiveKind, Purpose};

use super::*;

fn call(sequence: u64) -> Fingerprint {
    let (kind, purpose) = (CollectiveKind::AllGather, Purpose::Forward);
    Fingerprint { sequence, kind, purpose, unit: None, dtype: DType::F32, elements: 4 }
}

/// A world with one rank per core, all running, and their seats in a group.
fn running(ranks: usize, timeout: Duration) -> (Arc<RankScheduler>, Vec<Seat>) {
    let cores = Arc::new(RankScheduler::new(ranks, ranks, timeout));
    let members: Arc<[Rank]> = (0..ranks).map(Rank).collect();
    let group = Group::root(0, "all", &members);
    let start = |&rank: &Rank| {
        cores.start(rank);
        cores.seat(&group, rank)
    };
    let seats = members.iter().map(start).collect();
    (cores, seats)
}

#[test]
fn waiting_rank_releases_lock_to_rank_moving_data() {
    let (cores, seats) = running(2, Duration::ZERO);
    let is_done = Arc::new(AtomicBool::new(false));
    seats.iter().for_each(|&seat| assert_eq!(cores.enter(seat, call(0)).unwrap(), 0));
    let waits = thread::spawn({
        let (cores, is_done, seat) = (Arc::clone(&cores), Arc::clone(&is_done), seats[0]);
        move || cores.wait(seat, 0, &is_done)
    });
    // A spinning rank would never give up the lock to either of these.
    while lock(&cores.state).ranks[0] != Phase::Waiting(seats[0], 0) {
        thread::yield_now();
    }
    cores.complete(seats[0], 0, &is_done);
    cores.wait(seats[1], 0, &is_done).unwrap();
    waits.join().unwrap().unwrap();
    assert!(lock(&cores.state).rendezvous.table.is_idle(), "a collective that all have left is forgotten");
}

#[test]
fn stalled_rank_is_blamed_among_waiting_ranks() {
    let (cores, seats) = running(3, Duration::from_secs(600));
    let blamed = thread::scope(|scope| {
        let stalled = scope.spawn(|| cores.stall(Rank(1), call(0)));
        for (seat, is_done) in [(seats[0], AtomicBool::new(false)), (seats[2], AtomicBool::new(false))] {
            cores.enter(seat, call(0)).unwrap();
            let cores = &cores;
            scope.spawn(move || cores.wait(seat, 0, &is_done).unwrap_err());
        }
        stalled.join().unwrap()
    });
    let CommError::Missing { missing, .. } = &blamed else { panic!("{blamed}") };
    assert_eq!(**missing, [Rank(1)]);
    assert_eq!(cores.failure().unwrap().culprit, Rank(1));
}
