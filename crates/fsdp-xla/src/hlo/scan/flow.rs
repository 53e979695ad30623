//! Finds where operands of a run's rounds come from, and which results are read after the run.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use super::listing::Listing;
use super::runs::Run;
use crate::hlo::{Name, Value};

/// A value may be read at most this many rounds after the one that produces it.
const DISTANCE_MAX: usize = 4;

/// A result of a round: the index of its operation, and which of that operation's results it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct RoundResult {
    pub(super) operation: usize,
    pub(super) part: usize,
}

/// The source of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The same round.
    SameRound(RoundResult),
    /// Before the run, and the same in all rounds.
    Outside(Name),
    /// An earlier round: the first value of a chain.
    Chain(usize),
    /// Before the run, and different in each round: an element of a stack.
    Stack(usize),
}

/// A result that is read in later rounds. The loop carries one value per round of distance, the oldest first.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Chain {
    pub(super) result: RoundResult,
    /// The values before the first round; `None` for one that no round reads.
    pub(super) starts: Vec<Option<Value>>,
    /// The value that a round appends.
    pub(super) value: Value,
}

/// A result that is read after the run.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Output {
    pub(super) result: RoundResult,
    /// The chain whose final values include it; if `None`, the results of all rounds are kept.
    pub(super) chain: Option<usize>,
    /// The rounds whose results are read, and the names of these results.
    pub(super) read: BTreeMap<usize, Name>,
}

/// A run and its data flow.
#[derive(Clone, Debug)]
pub(super) struct Flow {
    pub(super) run: Run,
    /// For each operation of a round, the sources of its operands.
    pub(super) sources: Vec<Vec<Source>>,
    pub(super) chains: Vec<Chain>,
    /// For each stack, the value of each round.
    pub(super) stacks: Vec<Vec<Value>>,
    pub(super) outputs: Vec<Output>,
    /// Results that are read after the run, but only repeat a value from before it: the name of each, and of that value.
    pub(super) repeated: Vec<(Name, Name)>,
}

impl Flow {
    /// Analyzes a run; `None` if its data flow does not fit a loop, or a loop would not be shorter.
    pub(super) fn of(listing: &Listing<'_>, run: Run) -> Option<Self> {
        let mut flow = Self::analyze(listing, run)?;
        flow.find_outputs(listing);
        flow.is_shorter().then_some(flow)
    }

    /// Whether a loop has fewer operations than the run, those for stacks included. The search for runs ends because
    /// programs only become shorter.
    fn is_shorter(&self) -> bool {
        let Run { period, rounds, .. } = self.run;
        // A slice and two reshapes for each result that is read afterwards; for each stack about one operation per element to
        // put it together, and a few to access an element.
        let read: usize = self.outputs.iter().map(|output| 3 * output.read.len()).sum();
        period + read + (self.stacks.len() + self.outputs.len()) * (rounds + 8) < period * rounds
    }

    /// Analyzes a run, except for its outputs.
    fn analyze(listing: &Listing<'_>, run: Run) -> Option<Self> {
        let mut flow = Self {
            run,
            sources: Vec::new(),
            chains: Vec::new(),
            stacks: Vec::new(),
            outputs: Vec::new(),
            repeated: Vec::new(),
        };
        let mut known: HashMap<Vec<Name>, Source> = HashMap::new();
        for place in run.start..run.start + run.period {
            let mut sources = Vec::new();
            for operand in 0..listing.operands[place].len() {
                let of_round = |round: usize| listing.operands[place + round * run.period][operand];
                let names: Vec<Name> = (0..run.rounds).map(of_round).collect();
                let source = match known.get(&names) {
                    Some(source) => *source,
                    None => flow.source(listing, &names)?,
                };
                known.insert(names, source);
                sources.push(source);
            }
            flow.sources.push(sources);
        }
        Some(flow)
    }

    /// Bytes carried from one round to the next.
    pub(super) fn carried_bytes(listing: &Listing<'_>, run: Run) -> Option<usize> {
        let flow = Self::analyze(listing, run)?;
        let bytes = |chain: &Chain| chain.starts.len() * chain.value.shape.byte_len();
        Some(flow.chains.iter().map(bytes).sum())
    }

    /// For each chain, the range of its carried values.
    pub(super) fn slots(&self) -> impl Iterator<Item = Range<usize>> {
        self.chains.iter().scan(0, |end, chain| {
            let start = *end;
            *end += chain.starts.len();
            Some(start..*end)
        })
    }

    /// The source of an operand that has these names in the rounds.
    fn source(&mut self, listing: &Listing<'_>, names: &[Name]) -> Option<Source> {
        // The distance in rounds to the producer, if that is in the run.
        let result = |(round, name): (usize, &Name)| {
            let (place, part) = listing.producer(*name)?;
            let (producer_round, operation) = self.run.round(place)?;
            Some((round - producer_round, RoundResult { operation, part }))
        };
        let all: Vec<_> = names.iter().enumerate().map(result).collect();
        let Some((distance, result)) = all[all.len() - 1] else {
            return self.source_before(listing, names, all.iter().all(Option::is_none));
        };
        let is_regular = all.iter().enumerate().all(|(round, found)| match found {
            Some(found) => *found == (distance, result),
            None => round < distance,
        });
        match (is_regular && distance <= DISTANCE_MAX, distance) {
            (false, _) => None,
            (true, 0) => Some(Source::SameRound(result)),
            (true, _) => {
                let starts = names[..distance].iter().map(|&name| Some(listing.value(name))).collect();
                let value = listing.value(names[names.len() - 1]);
                self.chains.push(Chain { result, starts, value });
                Some(Source::Chain(self.chains.len() - 1))
            }
        }
    }

    fn source_before(&mut self, listing: &Listing<'_>, names: &[Name], is_before: bool) -> Option<Source> {
        if !is_before {
            return None;
        }
        if names.iter().all(|name| *name == names[0]) {
            return Some(Source::Outside(names[0]));
        }
        self.stacks.push(names.iter().map(|&name| listing.value(name)).collect());
        Some(Source::Stack(self.stacks.len() - 1))
    }

    fn find_outputs(&mut self, listing: &Listing<'_>) {
        let run = self.run;
        let mut outputs: BTreeMap<RoundResult, BTreeMap<usize, Name>> = BTreeMap::new();
        let later = listing.operands[run.end()..].iter().flatten();
        for &name in later.chain(listing.results.iter().map(|value| &value.name)) {
            let Some((place, part)) = listing.producer(name).filter(|(place, _)| *place < run.end()) else {
                continue;
            };
            let Some((round, operation)) = run.round(place) else { continue };
            outputs.entry(RoundResult { operation, part }).or_default().insert(round, name);
        }
        for (result, read) in outputs {
            let first = *read.keys().next().expect("an output is read");
            let has = |chain: &Chain| chain.result == result && first + chain.starts.len() >= run.rounds;
            let mut chain = self.chains.iter().position(has);
            let (before, source) = self.before_barriers(listing, result);
            if let (None, Some(source)) = (chain, source) {
                let value = |round: usize| match source {
                    Source::Stack(stack) => self.stacks[stack][round].name,
                    Source::Outside(name) => name,
                    _ => unreachable!("the source is before the run"),
                };
                self.repeated.extend(read.iter().map(|(&round, &name)| (name, value(round))));
                continue;
            }
            let result = if chain.is_none() { before } else { result };
            if chain.is_none() && first + 1 == run.rounds {
                self.chains.push(Chain { result, starts: vec![None], value: listing.value(read[&first]) });
                chain = Some(self.chains.len() - 1);
            }
            self.outputs.push(Output { result, chain, read });
        }
    }

    /// Follows a result through barriers, which repeat their operands: to the result of another operation, or to a
    /// source before the run.
    fn before_barriers(
        &self,
        listing: &Listing<'_>,
        mut result: RoundResult,
    ) -> (RoundResult, Option<Source>) {
        while listing.operations[self.run.start + result.operation].is_barrier() {
            match self.sources[result.operation][result.part] {
                Source::SameRound(operand) => result = operand,
                source @ (Source::Outside(_) | Source::Stack(_)) => return (result, Some(source)),
                Source::Chain(_) => break,
            }
        }
        (result, None)
    }
}
