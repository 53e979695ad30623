//! Products: the outputs of linear maps and of attention, and what a recomputation does about them.
//!
//! A forward that will be replayed *notes* its products, in order: whether anything read their contents, and
//! under selective checkpointing the contents themselves. The replay runs the same code, so it meets the same
//! products in the same order, and for each of them either takes what was kept, computes it again, or, when
//! nothing read it but what keeps and reads nothing in backward either (sums and dropout at the end of a layer),
//! goes on without its contents. So a replay stops as early as it can: the last linear map of a layer is never
//! computed twice.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;

/// Whether anything has read the contents of a product.
#[derive(Clone, Debug, Default)]
pub(super) struct Mark(Rc<Cell<bool>>);

impl Mark {
    /// Notes that something reads the contents.
    pub(super) fn read(&self) {
        self.0.set(true);
    }

    fn is_read(&self) -> bool {
        self.0.get()
    }
}

/// What a replay does about one product.
#[derive(Clone, Debug)]
enum Fate<B> {
    /// Its buffers are there.
    Kept(Vec<B>),
    /// It is computed again.
    Repeated,
    /// It has no contents: nothing reads them.
    Unread,
}

/// What the replay of a block needs of its forward.
#[derive(Clone, Debug)]
pub struct Replay<B> {
    fates: VecDeque<Fate<B>>,
}

/// A product that was made, and what was kept of it.
pub(super) struct Noted<B> {
    mark: Mark,
    kept: Option<Vec<B>>,
}

/// What a tape does about products.
pub(super) enum Products<B> {
    /// Computes them.
    Plain,
    /// Computes them for a replay.
    Noting { keep: bool, noted: Vec<Noted<B>> },
    /// Replays.
    Replaying(Replay<B>),
}

/// Where the next product comes from.
pub(super) enum Origin<B> {
    /// Its computation.
    Computed,
    /// The forward that is replayed.
    Kept(Vec<B>),
    /// Nowhere: it has no contents.
    Unread,
}

impl<B: Clone> Products<B> {
    pub(super) fn noting(keep: bool) -> Self {
        Products::Noting { keep, noted: Vec::new() }
    }

    /// Whether the products that are computed outlive the block.
    pub(super) fn are_kept(&self) -> bool {
        matches!(self, Products::Noting { keep: true, .. })
    }

    /// Where the next product comes from.
    ///
    /// # Panics
    /// When a replay makes more products than its forward: a model must run the same operations both times.
    pub(super) fn next(&mut self) -> Origin<B> {
        let Products::Replaying(replay) = self else { return Origin::Computed };
        match replay.fates.pop_front().expect("a replay makes the products of its forward") {
            Fate::Kept(buffers) => Origin::Kept(buffers),
            Fate::Repeated => Origin::Computed,
            Fate::Unread => Origin::Unread,
        }
    }

    /// Notes a product that was computed, if a replay will need it; returns its mark.
    pub(super) fn note(&mut self, buffers: &[B]) -> Option<Mark> {
        let Products::Noting { keep, noted } = self else { return None };
        let mark = Mark::default();
        noted.push(Noted { mark: mark.clone(), kept: keep.then(|| buffers.to_vec()) });
        Some(mark)
    }

    /// What a replay needs, after the last operation.
    pub(super) fn into_replay(self) -> Replay<B> {
        let Products::Noting { noted, .. } = self else { return Replay { fates: VecDeque::new() } };
        let fate = |Noted { mark, kept }: Noted<B>| match kept {
            _ if !mark.is_read() => Fate::Unread,
            Some(buffers) => Fate::Kept(buffers),
            None => Fate::Repeated,
        };
        Replay { fates: noted.into_iter().map(fate).collect() }
    }
}
