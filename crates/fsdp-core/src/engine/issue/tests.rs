use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::schedule::{Offload, Op, Source};
use crate::state::{GradientState, ParamState};
use crate::testing::{Built, setups};

/// What the engine keeps on the host, without buffers: states, free slots, collectives in flight.
struct Host<'a> {
    built: &'a Built,
    schedule: &'a Schedule,
    params: Vec<ParamState<()>>,
    gradients: Vec<GradientState<()>>,
    free_slots: Vec<bool>,
    free_gradient_slots: Vec<bool>,
    /// The unit in each staging slot.
    staged: Vec<Option<usize>>,
    free_reduced_slots: Vec<bool>,
    /// Units whose total is on the host.
    on_host: Vec<bool>,
    kept: Vec<bool>,
    incoming: Vec<bool>,
    totals: Vec<bool>,
    in_flight: BTreeSet<OpId>,
    done: Vec<OpKind>,
}

fn claim(flag: &mut bool, wanted: bool) {
    assert_eq!(*flag, wanted, "a slot or a result is not where it should be");
    *flag = !wanted;
}

impl<'a> Host<'a> {
    fn new(built: &'a Built, schedule: &'a Schedule) -> Self {
        let units = built.layout.units.len();
        Self {
            built,
            schedule,
            params: vec![ParamState::default(); units],
            gradients: vec![GradientState::default(); units],
            free_slots: vec![true; schedule.slots.len()],
            free_gradient_slots: vec![true; schedule.gradient_slots.len()],
            staged: vec![None; schedule.staging_slots.len()],
            free_reduced_slots: vec![true; schedule.reduced_slots.len()],
            on_host: vec![false; units],
            kept: vec![false; units],
            incoming: vec![false; units],
            totals: vec![false; units],
            in_flight: BTreeSet::new(),
            done: Vec::new(),
        }
    }

    fn count(&self, is: impl Fn(&OpKind) -> bool) -> usize {
        self.done.iter().filter(|kind| is(kind)).count()
    }

    /// What the numbers need, whatever queue they are made on.
    fn assert_values_are_there(&self, kind: &OpKind) {
        let units = self.built.layout.units.iter().filter(|unit| unit.is_trainable()).count();
        let phases = self.count(|done| matches!(done, OpKind::ReduceStatistics { .. }));
        let scalars = self.count(|done| matches!(done, OpKind::ReduceScalars));
        match *kind {
            OpKind::BeginStep => assert!(self.done.is_empty(), "the step begins first"),
            OpKind::AllGather { .. } => assert!(self.done.contains(&OpKind::BeginStep)),
            OpKind::KeepSubShard { unit } => {
                let reads = |id: &OpId| matches!(self.schedule.op(*id).kind, OpKind::AllGather { unit: u, .. } if u == unit);
                assert!(!self.in_flight.iter().any(reads), "a sub-shard that is gathered is not overwritten");
            }
            OpKind::ReduceScalars => {
                let norms = self.count(|done| matches!(done, OpKind::SquareNorm { .. }));
                let losses = self.count(|done| matches!(done, OpKind::Finish { .. }));
                let trains = self.schedule.ops.iter().any(|op| matches!(op.kind, OpKind::SquareNorm { .. }));
                assert_eq!((norms, losses), (units * usize::from(trains), self.schedule.rounds));
            }
            OpKind::Statistics { phase, .. } => assert_eq!((scalars, phases), (1, phase)),
            OpKind::ReduceStatistics { phase } => {
                let parts =
                    self.count(|done| matches!(done, OpKind::Statistics { phase: p, .. } if *p == phase));
                assert_eq!(parts, units, "all units are in the statistics");
            }
            OpKind::Update { unit } => {
                assert_eq!((scalars, phases), (1, self.built.phases));
                assert_eq!(self.on_host[unit], self.built.policy.offload == Offload::Cpu);
            }
            _ => {}
        }
    }

    fn settle(&mut self, id: OpId) -> Result<(), Error> {
        if !self.in_flight.remove(&id) {
            return Ok(());
        }
        match self.schedule.op(id).kind {
            OpKind::AllGather { unit, source, .. } => {
                if let Source::Staged(staging) = source {
                    assert_eq!(self.staged[staging].take(), Some(unit), "nobody overwrites what is gathered");
                }
                self.params[unit].arrive("unit", ())?;
            }
            OpKind::ReduceScatter { unit, .. } => {
                let slot = self.gradients[unit].arrive("unit")?;
                claim(&mut self.free_gradient_slots[slot], false);
                claim(&mut self.incoming[unit], false);
            }
            OpKind::AllReduceReplicas { unit } => claim(&mut self.totals[unit], false),
            _ => unreachable!("no other operation is in flight"),
        }
        Ok(())
    }

    fn computes(&mut self, block: usize, backward: bool) -> Result<(), Error> {
        for unit in self.built.units_of(block) {
            self.params[unit].unsharded("unit")?;
        }
        for &id in self.built.spec.blocks[block].params.iter().filter(|_| backward) {
            if self.built.spec.param(id).trainable {
                let state = &self.gradients[self.built.unit_of(id)];
                assert!(matches!(state, GradientState::Accumulating { .. }), "backward writes an open slot");
            }
        }
        Ok(())
    }

    fn execute(&mut self, id: OpId) -> Result<(), Error> {
        let kind = self.schedule.op(id).kind;
        self.assert_values_are_there(&kind);
        self.done.push(kind);
        if kind.is_collective() {
            self.in_flight.insert(id);
        }
        match kind {
            OpKind::Upload { unit, staging } => {
                self.params[unit].upload("unit", staging)?;
                assert_eq!(self.staged[staging].replace(unit), None, "a staging slot is free");
            }
            OpKind::AllGather { unit, slot, source, .. } => {
                match source {
                    Source::Staged(staging) => self.params[unit].gather_staged("unit", staging, slot)?,
                    _ => self.params[unit].gather("unit", slot)?,
                }
                claim(&mut self.free_slots[slot], true);
                assert!(source != Source::SubShard || self.kept[unit], "the sub-shard was kept");
            }
            OpKind::Forward { block, .. } => self.computes(block.0, false)?,
            OpKind::Finish { block, backward } => self.computes(block.0, backward)?,
            OpKind::Backward { block } => self.computes(block.0, true)?,
            OpKind::KeepSubShard { unit } => {
                self.params[unit].unsharded("unit")?;
                self.kept[unit] = true;
            }
            OpKind::Reshard { unit } => {
                let (slot, ()) = self.params[unit].reshard("unit")?;
                claim(&mut self.free_slots[slot], false);
            }
            OpKind::OpenGradient { unit, slot } => {
                self.gradients[unit].open("unit", slot)?;
                claim(&mut self.free_gradient_slots[slot], true);
            }
            OpKind::CloseGradient { unit } => self.gradients[unit].close("unit", ())?,
            OpKind::FoldUnsharded { unit, last } => {
                let (slot, ()) = self.gradients[unit].fold("unit")?;
                match last {
                    true => self.gradients[unit].total("unit", slot, ())?,
                    false => claim(&mut self.free_gradient_slots[slot], false),
                }
            }
            OpKind::ReduceScatter { unit, slot } => {
                self.gradients[unit].reduce("unit")?;
                if let Some(slot) = slot {
                    claim(&mut self.free_reduced_slots[slot], true);
                }
            }
            OpKind::Fold { unit, last } => {
                claim(&mut self.incoming[unit], true);
                self.totals[unit] |= last;
            }
            OpKind::AllReduceReplicas { unit } => claim(&mut self.totals[unit], true),
            OpKind::Download { unit, slot } => {
                self.gradients[unit].download("unit")?;
                assert!(self.totals[unit], "a download has the step's total");
                claim(&mut self.on_host[unit], false);
                if let Some(slot) = slot {
                    claim(&mut self.free_reduced_slots[slot], false);
                }
            }
            OpKind::SquareNorm { unit } | OpKind::Statistics { unit, .. } => assert!(self.totals[unit]),
            OpKind::Update { unit } => {
                self.gradients[unit].apply("unit")?;
                assert!(self.totals[unit], "an update has the step's total");
            }
            _ => {}
        }
        Ok(())
    }

    /// Issues everything; `choose` picks among the ready operations.
    fn run(&mut self, mut choose: impl FnMut(&[OpId]) -> usize) -> Result<Vec<OpId>, Error> {
        let mut frontier = Frontier::new(self.schedule);
        let mut issued = Vec::new();
        for _ in 0..self.schedule.ops.len() {
            let ready = frontier.ready(|op| self.in_flight.contains(&op));
            assert!(!ready.is_empty(), "something can always be issued");
            let id = ready[choose(&ready)];
            let Op { waits, joins, .. } = self.schedule.op(id).clone();
            for earlier in waits.into_iter().chain(joins) {
                self.settle(earlier)?;
            }
            self.execute(id)?;
            frontier.issued(id);
            issued.push(id);
        }
        assert!(self.in_flight.is_empty(), "every collective was handed over");
        Ok(issued)
    }

    fn assert_at_rest(&self) {
        assert!(self.params.iter().all(|state| *state == ParamState::Sharded));
        assert!(self.gradients.iter().all(|state| *state == GradientState::Empty));
        assert!(self.free_slots.iter().chain(&self.free_gradient_slots).all(|free| *free));
        assert!(!self.incoming.contains(&true));
        assert!(self.staged.iter().all(Option::is_none));
        assert!(self.free_reduced_slots.iter().all(|free| *free));
    }
}

/// A small generator, so that one seed is one order.
fn draw(seed: &mut u64) -> usize {
    *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*seed >> 33) as usize
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_allowed_order_is_legal_for_the_state_machines(setup in setups(), seed in any::<u64>()) {
        let built = setup.build();
        for schedule in [built.step(), built.evaluation()] {
            let in_order = Host::new(&built, &schedule).run(|_| 0).unwrap();
            prop_assert!(in_order.windows(2).all(|pair| pair[0] < pair[1]));
            let mut seed = seed;
            let mut host = Host::new(&built, &schedule);
            host.run(|ready| draw(&mut seed) % ready.len()).unwrap();
            host.assert_at_rest();
            // The greediest of all: the queue that is furthest ahead goes first.
            let mut host = Host::new(&built, &schedule);
            host.run(|ready| ready.len() - 1).unwrap();
            host.assert_at_rest();
        }
    }

    #[test]
    fn ranks_in_different_orders_never_wait_for_each_other(setup in setups(), seeds in any::<[u64; 3]>()) {
        let built = setup.build();
        assert_no_deadlock(&built.step(), &seeds);
        assert_no_deadlock(&built.evaluation(), &seeds);
    }
}

/// Ranks issue in orders of their own; whoever waits for a collective blocks until all ranks have issued it.
/// Ranks take turns at random, and there is always one that is not blocked.
fn assert_no_deadlock(schedule: &Schedule, seeds: &[u64; 3]) {
    let mut seeds = *seeds;
    let mut frontiers: Vec<Frontier<'_>> = seeds.iter().map(|_| Frontier::new(schedule)).collect();
    let mut in_flight: Vec<BTreeSet<OpId>> = vec![BTreeSet::new(); seeds.len()];
    let mut issued_by: BTreeMap<OpId, usize> = BTreeMap::new();
    // Scalars and statistics block where they are issued, until all ranks are there.
    let blocks = |kind: &OpKind| matches!(kind, OpKind::ReduceScalars | OpKind::ReduceStatistics { .. });
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
            if blocks(&op.kind) {
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
