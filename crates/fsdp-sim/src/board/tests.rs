use std::sync::Arc;
use std::thread;

use fsdp_core::DType;
use fsdp_core::comm::{CollectiveKind, Purpose};

use super::*;

const ID: MeetingId = MeetingId { group: 0, sequence: 0 };

fn arrival(ranks: usize, index: usize) -> Arrival {
    let call = Fingerprint {
        sequence: 0,
        kind: CollectiveKind::AllGather,
        purpose: Purpose::Forward,
        unit: None,
        dtype: DType::F32,
        elements: 4,
    };
    Arrival { id: ID, members: (0..ranks).map(Rank).collect(), index, call, note: index }
}

/// A board with one rank per core, all of them running.
fn running(ranks: usize, timeout: Duration) -> Arc<Board> {
    let board = Arc::new(Board::new(ranks, ranks, timeout));
    (0..ranks).for_each(|rank| board.enter(Rank(rank)));
    board
}

#[test]
fn who_waits_longer_than_the_limit_leaves_the_lock_to_the_rank_that_moves_the_data() {
    let board = running(2, Duration::ZERO);
    assert!(!board.arrive(arrival(2, 0)).unwrap());
    assert!(board.arrive(arrival(2, 1)).unwrap());
    let waits = thread::spawn({
        let board = Arc::clone(&board);
        move || board.wait(Rank(0), ID)
    });
    // Neither of these would ever get the lock from a rank that spins.
    while board.lock().ranks[0] != Doing::Waiting(ID) {
        thread::yield_now();
    }
    board.complete(ID);
    board.wait(Rank(1), ID).unwrap();
    waits.join().unwrap().unwrap();
}

#[test]
fn only_a_split_is_handed_the_notes_of_all_ranks() {
    let board = running(3, Duration::from_secs(600));
    let last: Vec<bool> = (0..3).map(|rank| board.arrive(arrival(3, rank)).unwrap()).collect();
    assert_eq!(last, [false, false, true]);
    board.complete(ID);
    assert_eq!(board.wait_for_notes(Rank(2), ID).unwrap(), [0, 1, 2]);
    board.wait(Rank(0), ID).unwrap();
    board.wait(Rank(1), ID).unwrap();
    assert!(!board.is_done(ID), "a collective that all have left is forgotten");
}
