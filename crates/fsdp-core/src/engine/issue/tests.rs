use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::checker::{Values, Violation};
use crate::schedule::Op;
use crate::testing::{Built, setups};

/// A model of an engine without buffers: their contents, and the collectives in flight.
struct Host<'a> {
    schedule: &'a Schedule,
    values: Values<'a>,
    in_flight: BTreeSet<OpId>,
}

impl<'a> Host<'a> {
    fn new(built: &'a Built, schedule: &'a Schedule) -> Self {
        let values = Values::of(schedule, &built.spec, &built.layout);
        Self { schedule, values, in_flight: BTreeSet::new() }
    }

    /// Asserts that an operation touches no buffer in flight, except reading one that the collective also reads.
    fn assert_free(&self, id: OpId) {
        let mine: Vec<_> = self.schedule.op(id).accesses().collect();
        for &other in &self.in_flight {
            for theirs in self.schedule.op(other).accesses() {
                let clashes = |mine: &&crate::schedule::Access| {
                    mine.buffer == theirs.buffer && (mine.write || theirs.write)
                };
                assert!(!mine.iter().any(|mine| clashes(&mine)), "{id:?} meets {other:?} in {theirs:?}");
            }
        }
    }

    /// Issues all operations; `choose` picks among the ready ones.
    fn run(&mut self, mut choose: impl FnMut(&[OpId]) -> usize) -> Result<Vec<OpId>, Violation> {
        let mut frontier = Frontier::new(self.schedule);
        let mut issued = Vec::new();
        for _ in 0..self.schedule.ops.len() {
            let ready = frontier.ready(|op| self.in_flight.contains(&op));
            assert!(!ready.is_empty(), "something can always be issued");
            let id = ready[choose(&ready)];
            let op = self.schedule.op(id);
            for earlier in op.waits.iter().chain(&op.joins) {
                self.in_flight.remove(earlier);
            }
            self.assert_free(id);
            self.values.apply(id.0, op)?;
            if op.kind.is_collective() {
                self.in_flight.insert(id);
            }
            frontier.issued(id);
            issued.push(id);
        }
        assert!(self.in_flight.is_empty(), "every collective was handed over");
        self.values.end()?;
        Ok(issued)
    }
}

/// A small generator: one seed gives one order.
fn draw(seed: &mut u64) -> usize {
    *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*seed >> 33) as usize
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn allowed_orders_see_same_buffer_contents_as_program_order(setup in setups(), seed in any::<u64>()) {
        let built = setup.build();
        for schedule in [built.step(), built.evaluation()] {
            let in_order = Host::new(&built, &schedule).run(|_| 0).unwrap();
            prop_assert!(in_order.windows(2).all(|pair| pair[0] < pair[1]));
            let mut seed = seed;
            Host::new(&built, &schedule).run(|ready| draw(&mut seed) % ready.len()).unwrap();
            // The greediest order: the queue that is furthest ahead goes first.
            Host::new(&built, &schedule).run(|ready| ready.len() - 1).unwrap();
        }
    }

    #[test]
    fn ranks_issuing_in_different_orders_never_deadlock(setup in setups(), seeds in any::<[u64; 3]>()) {
        let built = setup.build();
        assert_no_deadlock(&built.step(), &seeds);
        assert_no_deadlock(&built.evaluation(), &seeds);
    }
}

/// Lets ranks issue in different orders, taking turns at random. A rank that waits for a collective is blocked until
/// all ranks have issued it. Asserts that at any time at least one rank is not blocked.
fn assert_no_deadlock(schedule: &Schedule, seeds: &[u64; 3]) {
    let mut seeds = *seeds;
    let mut frontiers: Vec<Frontier<'_>> = seeds.iter().map(|_| Frontier::new(schedule)).collect();
    let mut in_flight: Vec<BTreeSet<OpId>> = vec![BTreeSet::new(); seeds.len()];
    let mut issued_by: BTreeMap<OpId, usize> = BTreeMap::new();
    // Scalars, statistics and calls that redistribute activations block the rank that issues them until all ranks have.
    let blocks = |op: &Op| {
        schedule.meets(op) || matches!(op.kind, OpKind::ReduceScalars | OpKind::ReduceStatistics(_))
    };
    let mut met: BTreeMap<OpId, BTreeSet<usize>> = BTreeMap::new();
    let mut next: Vec<Option<OpId>> = vec![None; seeds.len()];
    let mut left = seeds.len() * schedule.ops.len();
    while left > 0 {
        let mut moved = false;
        for rank in 0..seeds.len() {
            if frontiers[rank].done.iter().all(|done| *done) {
                continue;
            }
            let id = *next[rank].get_or_insert_with(|| {
                let ready = frontiers[rank].ready(|op| in_flight[rank].contains(&op));
                ready[draw(&mut seeds[rank]) % ready.len()]
            });
            let op = schedule.op(id);
            let earlier =
                || op.waits.iter().chain(&op.joins).filter(|target| in_flight[rank].contains(target));
            if earlier().any(|target| issued_by[target] < seeds.len()) {
                continue;
            }
            if blocks(op) {
                let there = met.entry(id).or_default();
                moved |= there.insert(rank);
                if there.len() < seeds.len() {
                    continue;
                }
            }
            let settled: Vec<OpId> = earlier().copied().collect();
            settled.iter().for_each(|target| {
                in_flight[rank].remove(target);
            });
            if op.kind.is_collective() {
                in_flight[rank].insert(id);
                *issued_by.entry(id).or_default() += 1;
            }
            frontiers[rank].issued(id);
            next[rank] = None;
            (moved, left) = (true, left - 1);
        }
        assert!(moved, "all ranks wait for each other");
    }
}
