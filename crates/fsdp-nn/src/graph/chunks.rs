//! Chunks of samples: graphs and plans are made for one chunk, and plans are repeated for all chunks of a rank.

use super::list::{List, Step};
use super::plan::{BackwardPlan, BlockPlan};
use super::{Call, Decl, Operand};
use crate::op::{Exchange, Op};

/// How samples are cut along their positions, under context parallelism: into `count` chunks of equally many consecutive
/// positions. Sums over the tokens of a micro-batch are trees over its chunks, so it is the number of chunks that
/// determines bits, and not the ranks that they are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Chunks {
    /// Number of chunks of a sample.
    pub count: usize,
    /// The first chunk on this rank.
    pub first: usize,
    /// Number of consecutive chunks on this rank: 1, or all.
    pub here: usize,
}

impl Chunks {
    /// Whole samples.
    pub const WHOLE: Chunks = Chunks::all(1);

    /// All of `count` chunks on one rank.
    pub const fn all(count: usize) -> Self {
        Self { count, first: 0, here: count }
    }

    /// One of `count` chunks.
    pub const fn one(chunk: usize, count: usize) -> Self {
        Self { count, first: chunk, here: 1 }
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
        let over = |list: &List| list.over_chunks(here, &self.places);
        let backward = self.backward.as_ref();
        Self {
            places: self.places.iter().map(|decl| Decl { rows: decl.rows * here, ..*decl }).collect(),
            forward: over(&self.forward),
            backward: backward.map(|plan| BackwardPlan { list: over(&plan.list), ..plan.clone() }),
            ..self.clone()
        }
    }
}

impl List {
    fn over_chunks(&self, here: usize, places: &[Decl]) -> Self {
        let steps = self.steps.iter().flat_map(|step| step.over_chunks(here, places)).collect();
        Self { unread: self.unread.clone(), steps }
    }
}

impl Step {
    fn over_chunks(&self, here: usize, places: &[Decl]) -> Vec<Step> {
        if let Op::Exchange(exchange) = self.call.op {
            let whole = |operand: Operand| match operand {
                Operand::Local { id, .. } => Operand::Local { id, offset: 0, len: here * places[id].len() },
                other => other,
            };
            let call = Call {
                op: Op::Exchange(Exchange { here, ..exchange }),
                reads: self.call.reads.iter().copied().map(whole).collect(),
                writes: self.call.writes.iter().map(|&(operand, add)| (whole(operand), add)).collect(),
                site: None,
            };
            return vec![Step { call, ..self.clone() }];
        }
        let step = |chunk| Step {
            call: self.call.of_chunk(chunk, |id| places[id].len()),
            chunk,
            begins: if chunk == 0 { self.begins.clone() } else { Vec::new() },
            ends: if chunk + 1 == here { self.ends.clone() } else { Vec::new() },
        };
        (0..here).map(step).collect()
    }
}
