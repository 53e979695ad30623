//! The placement of optimizer state that is not elementwise.

use fsdp_core::layout::Segment;
use fsdp_core::memory::Buffer;
use fsdp_core::model::ParamId;
use fsdp_core::update::{Piece, SegmentShard};
use fsdp_nn::update::{Adafactor, AdafactorFactors};

use super::elementwise::segment;
use crate::buffer::XlaBuffer;

/// Gives a shard's state, in programs, the length that it has on the rank with the most of it: programs are the same on
/// all ranks. The state that is kept, saved and counted is not longer for that.
pub(super) fn widen(rule: &Adafactor, shard: &SegmentShard<'_, XlaBuffer>) {
    if shard.state.iter().all(|buffer| buffer.storage.is_widened()) {
        return;
    }
    let (segment, dtype) = (segment(shard), shard.params.dtype());
    let mut padded_lens = vec![0; shard.state.len()];
    for other in 0..segment.shards {
        let state = rule.state(&segment.pieces(other), segment.shard_len(), dtype);
        padded_lens
            .iter_mut()
            .zip(state)
            .for_each(|(padded_len, tensor)| *padded_len = tensor.len.max(*padded_len));
    }
    shard.state.iter().zip(padded_lens).for_each(|(buffer, padded_len)| buffer.storage.widen(padded_len));
}

/// Index tables of a shard for Adafactor, with equal lengths on all ranks. Parameters are numbered as in the segment. A
/// missing entry has the index one past the end: a lookup then reads the last element, and its result is not used; an
/// addition is dropped.
pub(super) struct Places {
    /// For each row of the shard: its parameter.
    pub(super) param: Vec<usize>,
    /// For each row of the shard: its mean, among those of all factored rows.
    pub(super) mean: Vec<usize>,
    /// For each row of the shard: its parameter's column means, among those of all factored parameters of the shard.
    pub(super) columns: Vec<usize>,
    /// For each row mean: its row.
    pub(super) row_of_mean: Vec<usize>,
    /// For the column means of each factored parameter of the shard: the parameter.
    pub(super) param_of_columns: Vec<usize>,
    /// For each full moment: its element of the shard.
    pub(super) element_of_full: Vec<usize>,
}

impl Places {
    /// Builds the tables of pieces; `padded_lens` is the number of row means, column means, and full moments.
    pub(super) fn new(
        segment: &Segment,
        params: &[(ParamId, AdafactorFactors)],
        pieces: &[Piece],
        padded_lens: [usize; 3],
    ) -> Self {
        let (rows, width) = (segment.rows_per_rank, segment.row_len);
        let [means, blocks, full] = [padded_lens[0], padded_lens[1] / width, padded_lens[2]];
        let [mut row_of_mean, mut param_of_columns, mut element_of_full] = [const { Vec::new() }; 3];
        let mut param = vec![params.len(); rows];
        let (mut mean, mut columns) = (vec![means; rows], vec![blocks; rows]);
        for piece in pieces {
            let piece_rows = piece.offset / width..(piece.offset + piece.len).div_ceil(width);
            let number = params.iter().position(|(id, _)| *id == piece.param);
            let number = number.expect("a shard holds parameters of its segment");
            param[piece_rows.clone()].fill(number);
            if params[number].1.cols.is_none() {
                element_of_full.extend(piece.offset..piece.offset + piece.len);
                continue;
            }
            for row in piece_rows {
                (mean[row], columns[row]) = (row_of_mean.len(), param_of_columns.len());
                row_of_mean.push(row);
            }
            param_of_columns.push(number);
        }
        row_of_mean.resize(means, rows);
        param_of_columns.resize(blocks, params.len());
        element_of_full.resize(full, rows * width);
        Self { param, mean, columns, row_of_mean, param_of_columns, element_of_full }
    }
}
