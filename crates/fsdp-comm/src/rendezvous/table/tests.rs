use fsdp_core::DType;
use fsdp_core::comm::{CollectiveKind, Purpose, ReduceOp};

use super::*;

const LIMIT: Duration = Duration::from_secs(10);

fn call(sequence: u64) -> Fingerprint {
    let (kind, purpose) = (CollectiveKind::AllReduce(ReduceOp::Sum), Purpose::Scalars);
    Fingerprint { sequence, kind, purpose, unit: None, dtype: DType::I64, elements: 4 }
}

/// A table with two communicators of all ranks.
fn table(ranks: usize, now: Instant) -> (Table<bool>, Vec<Seat>, Vec<Seat>) {
    table_of(0..ranks, ranks, now)
}

/// A table of the ranks `here`, with two communicators of all ranks.
fn table_of(here: Range<usize>, ranks: usize, now: Instant) -> (Table<bool>, Vec<Seat>, Vec<Seat>) {
    let mut table = Table::new(here.clone());
    let members: Arc<[Rank]> = (0..ranks).map(Rank).collect();
    let mut seats = |path, name| {
        let group = Group::root(path, name, &members);
        here.clone().map(|rank| table.seat(&group, Rank(rank), None, now)).collect::<Vec<_>>()
    };
    let (gathers, reductions) = (seats(0, "gathers"), seats(1, "reductions"));
    (table, gathers, reductions)
}

/// In these tests, an event has passed if it is true.
fn settle(table: &mut Table<bool>, now: Instant) {
    table.settle(now, |_, event| Ok::<_, ()>(*event)).unwrap();
}

#[test]
fn mismatched_call_is_rejected_with_first_call() {
    let now = Instant::now();
    let (mut table, gathers, _) = table(3, now);
    assert_eq!(table.enter(gathers[2], call(0), now).unwrap(), 0);
    let other = Fingerprint { purpose: Purpose::UpdateRule, ..call(0) };
    let error = table.enter(gathers[0], other, now).unwrap_err();
    let expected = CommError::Mismatch { rank: Rank(0), got: other, peer: Rank(2), expected: call(0) };
    assert_eq!(error, expected);
    assert_eq!(table.enter(gathers[1], call(0), now).unwrap(), 0, "equal calls go on");
}

/// A group next to the one of `parents`, on the same NCCL communicator.
fn sharing(table: &mut Table<bool>, parents: &[Seat], now: Instant) -> Vec<Seat> {
    let members = table.members(parents[0]);
    let group = Group::root(0, "gathers", &members).split(0, &[0; 2], 0);
    let seat = |(&parent, &rank): (&Seat, &Rank)| table.seat(&group, rank, Some(parent), now);
    parents.iter().zip(members.iter()).map(seat).collect()
}

#[test]
fn groups_sharing_communicator_must_call_in_same_order() {
    let now = Instant::now();
    let (mut table, gathers, reductions) = table(2, now);
    let children = sharing(&mut table, &gathers, now);
    assert_eq!(table.enter(gathers[0], call(0), now).unwrap(), 0);
    assert_eq!(table.enter(children[0], call(0), now).unwrap(), 1);
    assert_eq!(table.enter(reductions[0], call(0), now).unwrap(), 0, "another communicator");
    let first = call(0);
    assert_eq!(
        table.status()[0].doing,
        format!(
            "gathers: issued {first}, ended none; reductions: issued {first}, ended none; gathers/0: issued {first}, \
             ended none"
        )
    );
    // NCCL would match the same call of the other group with the call of rank 0.
    let error = table.enter(children[1], call(0), now).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "collectives diverge: rank 1 called {first} of group gathers/0, but rank 0 called one of group gathers; \
             these groups share a connection, so every rank must call their collectives in the same order"
        )
    );
    assert!(table.enter(gathers[1], call(0), now).is_ok());
    assert!(table.enter(children[1], call(0), now).is_ok());
    assert!(table.lines[0].is_settled());
}

#[test]
fn missing_is_per_group_and_current_call_per_communicator() {
    let now = Instant::now();
    let (mut table, gathers, _) = table(2, now);
    let children = sharing(&mut table, &gathers, now);
    for seats in [&children, &gathers] {
        let position = table.enter(seats[0], call(seats[0].group as u64), now).unwrap();
        table.issued(seats[0], position, true);
    }
    assert_eq!(table.current(gathers[0]), Some(call(2)), "the child's call came first");
    let position = table.enter(children[1], call(2), now).unwrap();
    table.issued(children[1], position, true);
    let failure = table.overdue(now + LIMIT, LIMIT).unwrap();
    let CommError::TimedOut { call: late, missing, .. } = failure.error else { panic!("{}", failure.error) };
    assert_eq!((late, missing), (call(0), [Rank(1)].into()), "the child's call has all ranks");
    settle(&mut table, now);
    assert_eq!(table.current(gathers[0]), Some(call(0)), "the last that has ended");
}

#[test]
fn recent_calls_and_calls_not_yet_entered_are_kept() {
    let now = Instant::now();
    // The fourth rank is in another process, so calls are kept to be compared with its own.
    let (mut table, gathers, _) = table_of(0..3, 4, now);
    let mut enter = |seat: Seat, sequences: std::ops::Range<u64>| {
        for sequence in sequences {
            let position = table.enter(seat, call(sequence), now).unwrap();
            table.issued(seat, position, true);
        }
        table.lines[0].kept_len()
    };
    // However far two of the ranks are ahead, the third is compared with them.
    assert_eq!(enter(gathers[0], 0..9000), 9000);
    assert_eq!(enter(gathers[1], 0..9000), 9000);
    assert_eq!(enter(gathers[2], 0..6000), 4096);
    assert_eq!(enter(gathers[2], 6000..9000), 4096);
    assert!(table.lines[0].is_settled());
    assert!(!table.is_idle());
    settle(&mut table, now);
    assert!(table.is_idle());
    assert_eq!(table.status()[1].doing, format!("gathers: ended {}", call(8999)));
}

#[test]
fn single_process_drops_calls_all_ranks_entered() {
    let now = Instant::now();
    let (mut table, gathers, _) = table(2, now);
    for sequence in 0..100 {
        table.enter(gathers[0], call(sequence), now).unwrap();
    }
    for sequence in 0..99 {
        table.enter(gathers[1], call(sequence), now).unwrap();
    }
    assert_eq!(table.lines[0].kept_len(), 2, "the last that both have entered, and the one after it");
    assert!(table.enter(gathers[1], call(98), now).is_err());
}

#[test]
fn overdue_time_counts_from_reaching_front_of_line() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let (mut table, gathers, _) = table(2, start);
    for &seat in &gathers {
        let position = table.enter(seat, call(0), at(0)).unwrap();
        table.issued(seat, position, true);
        let position = table.enter(seat, call(1), at(0)).unwrap();
        table.issued(seat, position, false);
    }
    assert!(table.overdue(at(9), LIMIT).is_none());
    settle(&mut table, at(9));
    assert!(table.overdue(at(18), LIMIT).is_none(), "the second one is first in line since 9");
    let failure = table.overdue(at(19), LIMIT).unwrap();
    let CommError::TimedOut { rank, call: late, seconds, missing, .. } = failure.error else {
        panic!("{}", failure.error)
    };
    assert_eq!((rank, late, seconds, missing), (Rank(0), call(1), 10, [].into()));
    assert_eq!(failure.culprit, Rank(0));
}

#[test]
fn call_still_on_host_can_be_overdue() {
    let now = Instant::now();
    let (mut table, gathers, _) = table(2, now);
    table.enter(gathers[0], call(0), now).unwrap();
    settle(&mut table, now);
    let failure = table.overdue(now + LIMIT, LIMIT).unwrap();
    assert_eq!(failure.culprit, Rank(1));
    assert!(failure.error.to_string().contains("rank 1 did not enter it"), "{}", failure.error);
}

#[test]
fn end_of_wait_chain_is_blamed() {
    let now = Instant::now();
    let (mut table, gathers, reductions) = table(3, now);
    // 0 waits for 1 and 2; 1 waits for 0 and 2; 2 does not wait.
    table.enter(gathers[0], call(0), now).unwrap();
    table.enter(reductions[1], call(0), now).unwrap();
    let failure = table.overdue(now + LIMIT, LIMIT).unwrap();
    assert_eq!(failure.culprit, Rank(2));
    let status = table.status();
    assert_eq!(status[0].doing, format!("gathers: issued {}, ended none", call(0)));
    assert_eq!(status[2].doing, "has issued nothing");
}

#[test]
fn returned_rank_is_missing_before_timeout() {
    let now = Instant::now();
    let (mut table, gathers, _) = table(3, now);
    table.enter(gathers[0], call(0), now).unwrap();
    assert!(table.overdue(now, LIMIT).is_none());
    table.end_rank(Rank(2));
    let failure = table.overdue(now, LIMIT).unwrap();
    let CommError::Missing { missing, .. } = failure.error else { panic!("{}", failure.error) };
    assert_eq!((failure.culprit, missing), (Rank(2), [Rank(2)].into()), "rank 1 may still come");
}

#[test]
fn device_failure_names_rank_of_event() {
    let now = Instant::now();
    let (mut table, gathers, _) = table(2, now);
    let position = table.enter(gathers[1], call(0), now).unwrap();
    table.issued(gathers[1], position, false);
    assert_eq!(table.settle(now, |_, _| Err("lost")).unwrap_err(), (Rank(1), "lost"));
    assert_eq!(table.current(gathers[1]), Some(call(0)));
    assert_eq!(table.current(gathers[0]), None);
}
