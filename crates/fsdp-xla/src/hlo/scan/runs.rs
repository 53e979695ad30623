//! Finds where a program repeats equal operations.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use super::flow::Flow;
use super::listing::Listing;
use crate::hlo::Name;
use crate::hlo::operation::Operation;

/// Minimum number of rounds for a loop.
const ROUNDS_MIN: usize = 4;

/// Minimum operations per round for a loop.
const PERIOD_MIN: usize = 16;

/// Length of the window of operations whose previous occurrence is looked up.
const WINDOW: usize = 16;

/// Approximate maximum number of start positions to compare for a run.
const STARTS: usize = 50;

/// Consecutive rounds of equal operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Index of the first operation.
    pub(super) start: usize,
    /// Operations per round.
    pub(super) period: usize,
    pub(super) rounds: usize,
}

impl Run {
    pub(super) fn end(&self) -> usize {
        self.start + self.period * self.rounds
    }

    /// The round of an operation and its index within the round; `None` before the run.
    pub(super) fn round(&self, place: usize) -> Option<(usize, usize)> {
        let within = place.checked_sub(self.start)?;
        Some((within / self.period, within % self.period))
    }
}

/// A range of operations, each equal to the one a period later if that is in the range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    place: Range<usize>,
    period: usize,
}

impl Stretch {
    /// Whether rounds may be those of layers: they have matrix products, or each reads values of its own from before. The
    /// rounds of a random number generator, for example, do neither.
    pub(super) fn is_of_layers(&self, listing: &Listing<'_>) -> bool {
        let Range { start, .. } = self.place;
        let is_before = |name: Name| listing.producer(name).is_none_or(|(place, _)| place < start);
        let differs = |place: usize| {
            let [first, second] = [place, place + self.period].map(|place| &listing.operands[place]);
            let mut pairs = first.iter().zip(second);
            pairs.any(|(first, second)| first != second && is_before(*first) && is_before(*second))
        };
        self.has_product(listing) || (start..start + self.period).any(differs)
    }

    /// Whether rounds have loops with collectives.
    pub(super) fn has_loop(&self, listing: &Listing<'_>) -> bool {
        let Range { start, .. } = self.place;
        listing.operations[start..start + self.period].iter().any(Operation::is_loop)
    }

    /// Whether rounds have matrix products.
    pub(super) fn has_product(&self, listing: &Listing<'_>) -> bool {
        let Range { start, .. } = self.place;
        listing.operations[start..start + self.period].iter().any(Operation::has_product)
    }

    /// The run of all rounds of the stretch, starting where the fewest bytes are carried from round to round.
    pub(super) fn run(&self, listing: &Listing<'_>) -> Run {
        let (period, rounds) = (self.period, self.place.len() / self.period);
        let starts = self.place.start..=self.place.end - period * rounds;
        let starts = starts.clone().step_by(starts.count() / STARTS + 1);
        // A few rounds show what is carried.
        let carried = |start: &usize| {
            let few = Run { start: *start, period, rounds: ROUNDS_MIN };
            Flow::carried_bytes(listing, few).unwrap_or(usize::MAX)
        };
        let start = starts.min_by_key(carried).expect("rounds begin somewhere");
        Run { start, period, rounds }
    }
}

/// All stretches that are long enough, in order of increasing period.
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

/// The distances at which many operations repeat, in increasing order.
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
