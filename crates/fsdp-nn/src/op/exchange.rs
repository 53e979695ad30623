//! Redistribution between the chunks of samples, for attention under context parallelism (as DeepSpeed-Ulysses): an
//! all-to-all turns some positions of all heads into all positions of some heads, and back.

use fsdp_core::Error;

use super::describe::{Description, Role};
use crate::error::ModelError;
use crate::graph::{Backward, Builder, Call, Node, Operand, Tensor};
use crate::layer;
use crate::op::{Op, Pointwise};

/// An all-to-all between chunks. A chunk has one part for each chunk, and part `i` of the result of chunk `k` is part
/// `k` of chunk `i`. With several chunks on a rank, parts are ordered by the rank that has the other chunk.
///
/// The operation is run by the program, not by the backend: chunks of other ranks are reached through the communicator
/// of the context axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// Number of chunks.
    pub chunks: usize,
    /// Number of chunks among the operands, back to back.
    pub here: usize,
    /// Elements of a part.
    pub part: usize,
}

impl Exchange {
    pub(super) fn describe(self) -> Description {
        let len = self.here * self.chunks * self.part;
        Description::new("exchange").read([Role::value("x", len)]).write([Role::value("y", len)])
    }

    /// The gradient goes back in the same way.
    pub(super) fn derive(self, b: &mut Backward<'_>, node: &Node, output: usize) {
        let Some(dy) = b.take(output) else { return };
        let input = node.main().reads[0].local().expect("a value is exchanged");
        let Some(place) = b.overwrite(input) else { return };
        b.draft.call(Op::Exchange(self), vec![b.draft.whole(dy)], vec![(b.draft.whole(place), false)]);
        b.put(input, place);
    }
}

/// A copy of rows: their number and length, and the first element and the distance of rows on both sides.
pub(crate) struct Rows {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) from: [usize; 2],
    pub(crate) to: [usize; 2],
}

impl Rows {
    /// The call that copies them; the arguments make operands of a first element and a length.
    pub(crate) fn call(
        self,
        read: impl Fn(usize, usize) -> Operand,
        write: impl Fn(usize, usize) -> Operand,
    ) -> Call {
        let Self { rows, columns, from: [first, from], to: [start, to] } = self;
        let len = |distance: usize| rows.saturating_sub(1) * distance + columns;
        let op = Op::Pointwise(Pointwise::CopyColumns { rows, columns, from, to });
        Call::new(op, vec![read(first, len(from))], [(write(start, len(to)), false)])
    }
}

impl Builder<'_> {
    /// Causal self-attention of packed rows; `sinks` has the score of each head's sink, if it has one
    /// ([`Attention::Sink`](super::Attention)). If samples are cut into chunks, each chunk attends with its share of the
    /// heads over whole samples.
    ///
    /// # Errors
    /// If a width does not fit, or heads cannot be shared among the chunks.
    pub fn attention(
        &mut self,
        qkv: Tensor,
        sinks: Option<Tensor>,
        heads: &layer::Attention,
    ) -> Result<Tensor, Error> {
        self.check("attention", qkv, heads.packed())?;
        if let Some(sinks) = sinks {
            self.check("attention", sinks, heads.heads)?;
        }
        let chunks = self.chunks().count;
        if chunks == 1 {
            return Ok(self.attend(qkv, sinks, heads));
        }
        let share = self.share_of_chunk(heads)?;
        let (rows, width) = (self.row_count(), share.packed());
        // Of every section, each chunk gets some columns. Where there are more chunks than key heads, several get the same.
        let mut copies = Vec::new();
        for chunk in 0..chunks {
            let (mut section, mut column) = (0, 0);
            let (kv, kv_share) = (heads.kv_heads, share.kv_heads);
            for (all, of_chunk) in [(heads.heads, share.heads), (kv, kv_share), (kv, kv_share)] {
                let columns = of_chunk * heads.head_dim;
                let from = [section + chunk * all / chunks * heads.head_dim, qkv.width()];
                copies.push(Rows { rows, columns, from, to: [chunk * rows * width + column, width] });
                section += all * heads.head_dim;
                column += columns;
            }
        }
        let parts = self.rearrange(qkv, chunks * width, copies);
        let parts = self.exchange(parts);
        let sinks = sinks.map(|sinks| {
            let columns = share.heads;
            let copy = |chunk: usize| {
                let (from, to) = ([chunk * columns, heads.heads], [chunk * rows * columns, columns]);
                Rows { rows, columns, from, to }
            };
            let parts = self.rearrange(sinks, heads.heads, (0..chunks).map(copy).collect());
            self.exchange(parts)
        });
        let y = self.with_whole_samples(|b, positions| {
            let qkv = b.join_positions(parts, width, positions, false);
            let sinks = sinks.map(|sinks| b.join_positions(sinks, share.heads, positions, false));
            let y = b.attend(qkv, sinks, &share);
            b.join_positions(y, y.width(), positions, true)
        });
        let parts = self.exchange(y.with_width(y.width() * chunks));
        let columns = y.width();
        let copy = |chunk: usize| {
            let (from, to) = ([chunk * rows * columns, columns], [chunk * columns, chunks * columns]);
            Rows { rows, columns, from, to }
        };
        Ok(self.rearrange(parts, chunks * columns, (0..chunks).map(copy).collect()))
    }

    /// The heads of one of several chunks: a part of the query heads, and the key heads that they use.
    fn share_of_chunk(&self, all: &layer::Attention) -> Result<layer::Attention, Error> {
        let (chunks, heads, kv_heads) = (self.chunks().count, all.heads, all.kv_heads);
        let fits = |chunks: usize| {
            heads.is_multiple_of(chunks)
                && (kv_heads.is_multiple_of(chunks) || chunks.is_multiple_of(kv_heads))
        };
        if !fits(chunks) {
            let fitting = (1..chunks).rev().find(|size| size.is_power_of_two() && fits(*size)).unwrap_or(1);
            return Err(self.error(ModelError::SharedHeads { heads, kv_heads, chunks, fitting }));
        }
        Ok(layer::Attention { heads: heads / chunks, kv_heads: (kv_heads / chunks).max(1), ..*all })
    }

    /// Reorders rows from (chunk, sample, position) to (sample, chunk, position), or back, where a chunk has
    /// `positions` positions.
    fn join_positions(&mut self, x: Tensor, width: usize, positions: usize, back: bool) -> Tensor {
        let (samples, length) = self.batch();
        if samples == 1 {
            return x.with_width(width);
        }
        let (columns, chunks) = (positions * width, length / positions);
        let copy = |chunk: usize| {
            let (apart, together) =
                ([chunk * samples * columns, columns], [chunk * columns, chunks * columns]);
            let (from, to) = if back { (together, apart) } else { (apart, together) };
            Rows { rows: samples, columns, from, to }
        };
        self.rearrange(x, width, (0..chunks).map(copy).collect())
    }

    /// Copies all elements of a value to a new one, each to one place or to several.
    fn rearrange(&mut self, x: Tensor, width: usize, copies: Vec<Rows>) -> Tensor {
        let y = self.rows(width);
        let call =
            |rows: Rows| rows.call(|first, len| x.columns(first, len), |start, len| y.columns(start, len));
        self.node(copies.into_iter().map(call).collect(), None);
        y
    }

    fn exchange(&mut self, x: Tensor) -> Tensor {
        let (chunks, y) = (self.chunks().count, self.rows(x.width()));
        let part = self.row_count() * x.width() / chunks;
        let op = Op::Exchange(Exchange { chunks, here: 1, part });
        self.node(vec![Call::new(op, vec![self.whole(x)], [(self.whole(y), false)])], None);
        y
    }
}
