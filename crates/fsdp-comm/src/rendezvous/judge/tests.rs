use std::time::Instant;

use fsdp_core::DType;
use fsdp_core::comm::{CollectiveKind, Fingerprint, Purpose, ReduceOp};

use super::*;
use crate::rendezvous::{Group, Seat, Table};

const LIMIT: Duration = Duration::from_secs(10);
const PATIENCE: Duration = Duration::from_secs(2);

fn call(sequence: u64, elements: usize) -> Fingerprint {
    let (kind, purpose) = (CollectiveKind::AllReduce(ReduceOp::Sum), Purpose::Scalars);
    Fingerprint { sequence, kind, purpose, unit: None, dtype: DType::I64, elements }
}

/// Processes with `local` ranks each, and their tables.
struct World {
    tables: Vec<Table<bool>>,
    local: usize,
    start: Instant,
}

impl World {
    fn new(processes: usize, local: usize) -> Self {
        let table = |process: usize| Table::new(process * local..(process + 1) * local);
        Self { tables: (0..processes).map(table).collect(), local, start: Instant::now() }
    }

    fn ranks(&self) -> usize {
        self.tables.len() * self.local
    }

    /// The seats of all members of a group, by index.
    fn group(&mut self, path: &[u64], members: &[usize], shares: Option<&[Seat]>) -> Vec<Seat> {
        let ranks: Arc<[Rank]> = members.iter().copied().map(Rank).collect();
        let group = Group { path: path.to_vec(), name: format!("group {path:?}"), members: ranks };
        let seat = |(place, &rank): (usize, &usize)| {
            let shared = shares.map(|seats| seats[place]);
            self.tables[rank / self.local].seat(&group, Rank(rank), shared, self.start)
        };
        members.iter().enumerate().map(seat).collect()
    }

    fn all(&mut self, path: u64) -> Vec<Seat> {
        let members: Vec<usize> = (0..self.ranks()).collect();
        self.group(&[path], &members, None)
    }

    /// Enters a rank into a call that ends at once, or never.
    fn enter(&mut self, rank: usize, seat: Seat, call: Fingerprint, ends: bool) {
        let table = &mut self.tables[rank / self.local];
        let position = table.enter(seat, call, self.start).unwrap();
        table.issued(seat, position, ends);
        table.settle(self.start, |_, ends| Ok::<_, ()>(*ends)).unwrap();
    }

    /// The ruling after `passed` has passed.
    fn judged(&self, passed: Duration, requested: Option<&[u64]>) -> Ruling {
        let report = |table: &Table<bool>| {
            let report = table.report(self.start + passed, PATIENCE, self.ranks(), requested);
            let decoded = Report::decode(&report.encode()).unwrap();
            assert_eq!(decoded, report, "it arrives as it was told");
            decoded
        };
        judge(&self.tables.iter().map(report).collect::<Vec<_>>(), self.ranks(), LIMIT)
    }

    #[track_caller]
    fn failure(&self, passed: Duration, requested: Option<&[u64]>) -> Failure {
        match self.judged(passed, requested) {
            Ruling::Failed(failure) => failure,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn first_divergent_call_is_found_across_processes() {
    let mut chance = 1_u64;
    let mut random = |below: u64| {
        chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (chance >> 33) % below
    };
    for _ in 0..300 {
        let (processes, local) = (2 + random(3) as usize, 1 + random(2) as usize);
        let mut world = World::new(processes, local);
        let seats = world.all(0);
        let (culprit, at) = (random(processes as u64) as usize, random(30));
        let hangs = random(2) == 0;
        let mut parted = 0;
        let mut counts = Vec::new();
        for (rank, &seat) in seats.iter().enumerate() {
            // Ranks of one process are compared immediately, so they diverge together.
            let is_other = rank / local == culprit;
            let count = random(40);
            for sequence in 0..count {
                let elements = if is_other && sequence == at { 5 } else { 4 };
                world.enter(rank, seat, call(sequence, elements), !hangs || sequence < at);
            }
            parted += usize::from(is_other && count > at);
            counts.push(count);
        }
        let others = (0..world.ranks()).filter(|rank| rank / local != culprit && counts[*rank] > at).count();
        let is_divergent = parted > 0 && others > 0;
        let passed = PATIENCE + Duration::from_secs(1);
        match world.judged(passed, Some(&[0])) {
            Ruling::Failed(Failure { error: CommError::Mismatch { got, expected, rank, peer }, .. }) => {
                assert!(is_divergent);
                assert_eq!((got.sequence, expected.sequence), (at, at));
                assert_eq!(got.elements + expected.elements, 9);
                assert!((rank.0 / local == culprit) != (peer.0 / local == culprit));
                assert!(processes == 2 || others == 1 || rank.0 / local == culprit || local > 1, "{rank}");
            }
            Ruling::Fine => assert!(!is_divergent, "{processes} x {local}: {culprit} at {at} of {counts:?}"),
            other => panic!("{other:?}"),
        }
        if is_divergent && hangs {
            assert!(matches!(world.judged(passed, None), Ruling::Failed(_)), "who waits tells unasked");
        }
    }
}

#[test]
fn silent_divergence_is_queried_and_named_if_still_kept() {
    for (calls, is_kept) in [(10, true), (9000, false)] {
        let mut world = World::new(3, 1);
        let seats = world.all(0);
        for (rank, &seat) in seats.iter().enumerate() {
            for sequence in 0..calls {
                let elements = if rank == 1 && sequence == 3 { 5 } else { 4 };
                world.enter(rank, seat, call(sequence, elements), true);
            }
        }
        assert!(matches!(world.judged(LIMIT, None), Ruling::Ask(path) if path == [0]));
        let Failure { culprit, error } = world.failure(LIMIT, Some(&[0]));
        assert_eq!(culprit, Rank(1));
        let expected = if is_kept {
            CommError::Mismatch { rank: Rank(1), got: call(3, 5), peer: Rank(0), expected: call(3, 4) }
        } else {
            CommError::Differs { ranks: vec![Rank(1)], reference: Rank(0) }
        };
        assert_eq!(error, expected);
    }
}

#[test]
fn groups_sharing_communicator_are_distinguished_by_path() {
    let mut world = World::new(2, 1);
    let parents = world.all(0);
    let children = world.group(&[0, 7, 0], &[0, 1], Some(&parents));
    world.enter(0, parents[0], call(0, 4), false);
    world.enter(1, children[1], call(0, 4), false);
    let error = world.failure(PATIENCE, None).error;
    let CommError::Order { rank, group, peer, peer_group, .. } = &error else { panic!("{error}") };
    assert_eq!((rank, peer), (&Rank(1), &Rank(0)));
    assert_eq!((group.as_str(), peer_group.as_str()), ("group [0, 7, 0]", "group [0]"));
}

#[test]
fn end_of_cross_process_wait_chain_is_blamed() {
    let mut world = World::new(3, 1);
    let (gathers, reductions) = (world.all(0), world.all(1));
    let pair = world.group(&[0, 1, 1], &[1, 2], None);
    world.enter(0, gathers[0], call(0, 4), false);
    world.enter(1, pair[0], call(0, 4), false);
    world.enter(2, reductions[2], call(0, 4), true);
    assert!(matches!(world.judged(LIMIT - Duration::from_millis(1), None), Ruling::Fine));
    let Failure { culprit, error } = world.failure(LIMIT, None);
    assert_eq!(culprit, Rank(2));
    let CommError::TimedOut { rank, missing, status, seconds, .. } = &error else { panic!("{error}") };
    assert_eq!((rank, *seconds, missing[0]), (&Rank(0), 10, Rank(2)));
    assert_eq!(status.len(), 2, "those that wait tell what they do");
}

#[test]
fn rank_without_its_group_yet_is_blamed_as_missing() {
    let mut world = World::new(2, 1);
    let all = world.all(0);
    let group = Group { path: vec![0, 0, 0], name: "child".to_owned(), members: [Rank(0), Rank(1)].into() };
    let child = world.tables[0].seat(&group, Rank(0), None, world.start);
    world.enter(0, all[0], call(0, 4), true);
    world.enter(0, child, call(0, 4), false);
    let Failure { culprit, error } = world.failure(LIMIT, None);
    assert_eq!(culprit, Rank(1), "{error}");
}

#[test]
fn returned_remote_rank_is_missing_before_timeout() {
    let mut world = World::new(2, 2);
    let seats = world.all(0);
    for rank in [0, 1, 2] {
        world.enter(rank, seats[rank], call(0, 4), false);
    }
    world.tables[1].end_rank(Rank(3));
    assert!(matches!(world.judged(PATIENCE / 2, None), Ruling::Fine), "nobody tells of waiting yet");
    let Failure { culprit, error } = world.failure(PATIENCE, None);
    let CommError::Missing { missing, .. } = error else { panic!("{error}") };
    assert_eq!((culprit, missing), (Rank(3), [Rank(3)].into()));
}

#[test]
fn world_is_over_once_all_ranks_return() {
    let mut world = World::new(2, 2);
    world.all(0);
    for rank in 0..4 {
        assert!(matches!(world.judged(LIMIT, None), Ruling::Fine), "{rank} is there");
        world.tables[rank / 2].end_rank(Rank(rank));
    }
    assert!(matches!(world.judged(LIMIT, None), Ruling::Over));
}
