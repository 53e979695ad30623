//! Where a program repeats equal operations.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use super::Listing;
use super::flow::Flow;

/// Fewer rounds than this are no loop.
const ROUNDS_MIN: usize = 4;

/// Rounds of fewer operations than this are no loop.
const PERIOD_MIN: usize = 16;

/// Operations that are looked at together to find where they were last.
const WINDOW: usize = 16;

/// At most about so many places where the rounds of a run may begin are compared.
const STARTS: usize = 50;

/// Rounds of equal operations, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// The place of the first operation.
    pub(super) start: usize,
    /// Operations of a round.
    pub(super) period: usize,
    pub(super) rounds: usize,
}

impl Run {
    pub(super) fn end(&self) -> usize {
        self.start + self.period * self.rounds
    }

    /// The round in which an operation is, and its place there; none before the run.
    pub(super) fn round(&self, place: usize) -> Option<(usize, usize)> {
        let within = place.checked_sub(self.start)?;
        Some((within / self.period, within % self.period))
    }
}

/// Operations each of which equals the one a period further on, where that is in the stretch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    place: Range<usize>,
    period: usize,
}

impl Stretch {
    /// The run of all its rounds, begun about where least goes from each round to the next.
    pub(super) fn run(&self, listing: &Listing<'_>) -> Run {
        let (period, rounds) = (self.period, self.place.len() / self.period);
        let starts = self.place.start..=self.place.end - period * rounds;
        let starts = starts.clone().step_by(starts.count() / STARTS + 1);
        // A few rounds show what goes from each to the next.
        let carried = |start: &usize| {
            let few = Run { start: *start, period, rounds: ROUNDS_MIN };
            Flow::carried_bytes(listing, few).unwrap_or(usize::MAX)
        };
        let start = starts.min_by_key(carried).expect("rounds begin somewhere");
        Run { start, period, rounds }
    }
}

/// All stretches that are long enough, those with the shortest periods first.
pub(super) fn stretches(kinds: &[usize]) -> Vec<Stretch> {
    let mut found = Vec::new();
    for period in periods(kinds) {
        let mut start = 0;
        while start + period < kinds.len() {
            let equal =
                (start..kinds.len() - period).take_while(|&at| kinds[at] == kinds[at + period]).count();
            if equal >= (ROUNDS_MIN - 1) * period {
                found.push(Stretch { place: start..start + equal + period, period });
            }
            start += equal + 1;
        }
    }
    found
}

/// The distances at which many operations are repeated, in order.
fn periods(kinds: &[usize]) -> Vec<usize> {
    let (mut last, mut distances) = (HashMap::new(), BTreeMap::new());
    for (at, window) in kinds.windows(WINDOW).enumerate() {
        if let Some(before) = last.insert(window, at) {
            *distances.entry(at - before).or_insert(0) += 1;
        }
    }
    let is_period = |(distance, count): &(usize, usize)| *distance >= PERIOD_MIN && count >= distance;
    distances.into_iter().filter(is_period).map(|(distance, _)| distance).collect()
}
