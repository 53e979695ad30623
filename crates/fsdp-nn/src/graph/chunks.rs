//! Chunks of samples: graphs and plans are made for one chunk, and plans are repeated for all chunks of a rank.

use super::list::{List, Step};
use super::plan::{BackwardPlan, BlockPlan};
use super::{Call, Decl, Operand};
use crate::op::{Exchange, Op, Rows};

/// How samples are cut along their positions, under context parallelism: into `count` chunks of equally many consecutive
/// positions. Sums over the tokens of a micro-batch are trees over its chunks, so it is the number of chunks that
/// determines bits, and not the ranks that they are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Chunks {
    /// Number of chunks of a sample.
    pub count: usize,
    /// The first chunk on this rank.
    pub first: usize,
    /// Number of consecutive chunks on this rank.
    pub here: usize,
}

impl Chunks {
    /// Whole samples.
    pub const WHOLE: Chunks = Chunks::all(1);

    /// All of `count` chunks on one rank.
    pub const fn all(count: usize) -> Self {
        Self { count, first: 0, here: count }
    }

    /// By chunk on this rank and sample: of the first `lengths` rows of each sample, those in the chunk, of `rows` rows.
    pub(crate) fn lengths(&self, lengths: &[usize], rows: usize) -> Vec<usize> {
        let here = self.first..self.first + self.here;
        let of_chunk = |chunk: usize| move |length: &usize| length.saturating_sub(chunk * rows).min(rows);
        here.flat_map(|chunk| lengths.iter().map(of_chunk(chunk))).collect()
    }

    /// Of so many rows of whole samples, those on this rank; and whether their positions are uploaded, as they are for
    /// samples with several documents (`packed`).
    pub(crate) fn rows(&self, all: usize, packed: bool) -> (usize, bool) {
        (all / self.count * self.here, packed || self.count > 1)
    }
}

impl BlockPlan {
    /// Repeats the calls of a plan for `here` chunks, which lie one after the other in each place.
    pub(crate) fn over_chunks(&self, here: usize) -> Self {
        let mut places = self.places.iter().map(|decl| Decl { rows: decl.rows * here, ..*decl }).collect();
        let mut over = |list: &List| list.over_chunks(here, &mut places);
        let forward = over(&self.forward);
        let backward =
            self.backward.as_ref().map(|plan| BackwardPlan { list: over(&plan.list), ..plan.clone() });
        Self { places, forward, backward, ..self.clone() }
    }
}

impl List {
    fn over_chunks(&self, here: usize, places: &mut Vec<Decl>) -> Self {
        let steps = self.steps.iter().flat_map(|step| step.over_chunks(here, places)).collect();
        Self { unread: self.unread.clone(), steps }
    }
}

impl Step {
    fn over_chunks(&self, here: usize, places: &mut Vec<Decl>) -> Vec<Step> {
        if let Op::Exchange(exchange) = self.call.op {
            return self.exchange_over_chunks(Exchange { here, ..exchange }, places);
        }
        let step = |chunk| Step {
            call: self.call.of_chunk(chunk, |id| places[id].len() / here),
            chunk,
            begins: if chunk == 0 { self.begins.clone() } else { Vec::new() },
            ends: if chunk + 1 == here { self.ends.clone() } else { Vec::new() },
        };
        (0..here).map(step).collect()
    }

    /// The steps of an exchange with several chunks on the rank. Their parts are first ordered by the chunk that they go to:
    /// if all chunks are here, that is all. Otherwise each rank sends to every other the parts for its chunks, back to
    /// back, and the parts that it receives are ordered by the chunk that they are for.
    fn exchange_over_chunks(&self, exchange: Exchange, places: &mut Vec<Decl>) -> Vec<Step> {
        let Exchange { chunks, here, part } = exchange;
        let local = |operand: Operand| operand.local().expect("a value is exchanged");
        let (x, y) = (local(self.call.reads[0]), local(self.call.writes[0].0));
        let by_target = |chunk: usize| Rows {
            rows: chunks,
            columns: part,
            from: [chunk * chunks * part, part],
            to: [chunk * part, here * part],
        };
        let mut calls: Vec<Call> = (0..here).map(|chunk| by_target(chunk).copied(x, y)).collect();
        let packed = calls.len();
        let mut received = None;
        if here < chunks {
            places.push(places[y]);
            let z = received.insert(places.len() - 1);
            let whole = |id: usize| Operand::Local { id, offset: 0, len: here * chunks * part };
            calls.push(Call::new(Op::Exchange(exchange), vec![whole(y)], [(whole(*z), false)]));
            let block = here * part;
            let by_chunk = |chunk: usize| Rows {
                rows: chunks / here,
                columns: block,
                from: [chunk * block, here * block],
                to: [chunk * chunks * part, block],
            };
            calls.extend((0..here).map(|chunk| by_chunk(chunk).copied(*z, y)));
        }
        let step = |call| Step { call, chunk: 0, begins: Vec::new(), ends: Vec::new() };
        let mut steps: Vec<Step> = calls.into_iter().map(step).collect();
        steps[0].begins.clone_from(&self.begins);
        let (early, late): (Vec<usize>, Vec<usize>) = self.ends.iter().partition(|&&id| id == x);
        steps[packed - 1].ends = early;
        if let Some(received) = received {
            steps[packed].begins.push(received);
        }
        steps.last_mut().expect("there are parts to order").ends.extend(late.into_iter().chain(received));
        steps
    }
}

impl Rows {
    /// The call that copies rows of a place to another one.
    fn copied(self, from: usize, to: usize) -> Call {
        self.call(
            |offset, len| Operand::Local { id: from, offset, len },
            |offset, len| Operand::Local { id: to, offset, len },
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn lengths_of_chunks_count_the_rows_that_whole_samples_count(
            lengths in prop::collection::vec(0usize..=12, 1..4), first in 0usize..4, here in 1usize..4,
        ) {
            let (rows, chunks) = (3, Chunks { count: 4, first, here: here.min(4 - first) });
            let counted = |chunk: usize, length: usize| (chunk * rows..(chunk + 1) * rows).filter(move |&row| row < length);
            let expected: Vec<usize> = (first..first + chunks.here)
                .flat_map(|chunk| lengths.iter().map(move |&length| counted(chunk, length).count()))
                .collect();
            prop_assert_eq!(chunks.lengths(&lengths, rows), expected);
        }
    }
}
