//! AdamW on blocks of 8-bit moments.

use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_core::Error;
use fsdp_core::memory::{Slice, SliceMut};
use fsdp_core::model::ParamId;
use fsdp_core::update::SegmentShard;

use super::finite_check::FiniteCheck;
use super::pass::{HostScalars, Scale, factors, skip, step};
use crate::host::element::Float;
use crate::host::floats::{Floats, transfer};
use crate::host::raw::vectorized;
use crate::host::workers::{TASK_ELEMS, task_rows};
use crate::host::{HostBuffer, HostMemory};
use crate::quantized::CodeBook;
use crate::update::adamw8bit::{AdamW8bit, blocks};

const BLOCK: usize = AdamW8bit::BLOCK;

/// Number of lanes in the search for the largest magnitude.
const LANES: usize = 16;

impl AdamW8bit {
    pub(super) fn typed<A: Float>(
        &self,
        memory: &HostMemory,
        shard: &mut SegmentShard<'_, HostBuffer>,
        scalars: &HostScalars,
    ) -> Result<(), Error> {
        let (limits, exceeds) = (FiniteCheck::finite(shard), AtomicBool::new(false));
        let scale = Scale::<A>::new(scalars);
        let gradient = memory.floats(Slice::whole(shard.gradient))?;
        let tasks = self.tasks::<A>(memory, shard)?;
        memory.workers().each(tasks.into_iter(), |task| {
            let factors = factors::<A>(&self.adamw, task.param, scalars);
            task.run(gradient, |gradient, params, state| {
                if step(&self.adamw, &factors, scale, gradient, params, state).exceeds(&limits) {
                    exceeds.store(true, Ordering::Relaxed);
                }
            });
        });
        if exceeds.into_inner() { shard.note_not_finite(memory) } else { Ok(()) }
    }

    /// Splits the pieces of a shard into tasks of whole rows.
    fn tasks<'a, A: Float>(
        &self,
        memory: &HostMemory,
        shard: &'a mut SegmentShard<'_, HostBuffer>,
    ) -> Result<Vec<Task<'a, A>>, Error> {
        let mut params = memory.elements_mut::<A>(SliceMut::whole(shard.params))?;
        let count = shard.state.len();
        let [mean, square, mean_codes, square_codes, mean_largest, square_largest] = &mut *shard.state else {
            panic!("{count} state tensors where the rule declared 6");
        };
        let mut full =
            [memory.elements_mut::<A>(SliceMut::whole(mean))?, memory.elements_mut(SliceMut::whole(square))?];
        let mut codes = [
            memory.elements_mut::<u8>(SliceMut::whole(mean_codes))?,
            memory.elements_mut(SliceMut::whole(square_codes))?,
        ];
        let mut largest = [
            memory.elements_mut::<A>(SliceMut::whole(mean_largest))?,
            memory.elements_mut(SliceMut::whole(square_largest))?,
        ];
        let (mut tasks, mut position) = (Vec::new(), 0);
        for piece in shard.pieces {
            skip(&mut params, piece.offset - position);
            let row_len = self.row_len(piece.param);
            let max_len = row_len.map_or(TASK_ELEMS, |row_len| row_len * task_rows(row_len));
            for start in (0..piece.len).step_by(max_len) {
                let len = max_len.min(piece.len - start);
                let moments = match row_len {
                    None => Moments::Full(full.each_mut().map(|moment| skip(moment, len))),
                    Some(row_len) => Moments::Coded {
                        row_len,
                        codes: codes.each_mut().map(|codes| skip(codes, len)),
                        largest: largest.each_mut().map(|values| skip(values, blocks(len, row_len))),
                    },
                };
                let params = skip(&mut params, len);
                tasks.push(Task { param: piece.param, start: piece.offset + start, params, moments });
            }
            position = piece.offset + piece.len;
        }
        Ok(tasks)
    }
}

/// A part of a piece.
struct Task<'a, A> {
    param: ParamId,
    /// Offset of its first element within the shard.
    start: usize,
    params: &'a mut [A],
    moments: Moments<'a, A>,
}

/// The first and the second moment.
enum Moments<'a, A> {
    Full([&'a mut [A]; 2]),
    Coded { row_len: usize, codes: [&'a mut [u8]; 2], largest: [&'a mut [A]; 2] },
}

impl<A: Float> Task<'_, A> {
    /// Calls `step` with gradient, parameters and moments of every block.
    fn run(self, gradient: Floats<'_>, step: impl Fn(&[A], &mut [A], &mut [&mut [A]])) {
        let Self { start, params, moments, .. } = self;
        let mut slopes = [A::ZERO; BLOCK];
        let mut step = |offset: usize, params: &mut [A], mean: &mut [A], square: &mut [A]| {
            let len = params.len();
            let slopes = &mut slopes[..len];
            transfer(gradient.range(start + offset, len), A::floats_mut(slopes), false);
            step(slopes, params, &mut [mean, square]);
        };
        match moments {
            Moments::Full([mean, square]) => {
                let moments = mean.chunks_mut(BLOCK).zip(square.chunks_mut(BLOCK));
                for (index, (params, (mean, square))) in params.chunks_mut(BLOCK).zip(moments).enumerate() {
                    step(index * BLOCK, params, mean, square);
                }
            }
            Moments::Coded { row_len, codes, largest } => {
                let [mean, square] = codes.map(|codes| in_blocks(codes, row_len));
                let [mean_largest, square_largest] = largest.map(|largest| largest.iter_mut());
                let moments = mean.zip(mean_largest).zip(square.zip(square_largest));
                let mut offset = 0;
                for (params, (mean, square)) in in_blocks(params, row_len).zip(moments) {
                    let len = params.len();
                    coded(mean, CodeBook::signed(), len, |mean| {
                        coded(square, CodeBook::unsigned(), len, |square| step(offset, params, mean, square));
                    });
                    offset += len;
                }
            }
        }
    }
}

/// Iterates over the blocks of whole rows.
fn in_blocks<T>(rows: &mut [T], row_len: usize) -> impl Iterator<Item = &mut [T]> {
    rows.chunks_mut(row_len).flat_map(|row| row.chunks_mut(BLOCK))
}

/// Decodes a block, applies `change`, and encodes the result.
fn coded<A: Float>(
    (codes, largest): (&mut [u8], &mut A),
    book: &CodeBook,
    len: usize,
    change: impl FnOnce(&mut [A]),
) {
    let mut values = [A::ZERO; BLOCK];
    let values = &mut values[..len];
    decode(book, codes, *largest, values);
    change(values);
    *largest = encode(book, values, codes);
}

vectorized! {
    fn decode<A: Float>(book: &CodeBook, codes: &[u8], largest: A, values: &mut [A]) {
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = A::of(f64::from(book.values[usize::from(code)])) * largest;
        }
    }
}

vectorized! {
    /// Encodes values; returns the largest magnitude.
    fn encode<A: Float>(book: &CodeBook, values: &[A], codes: &mut [u8]) -> A {
        let larger = |a: A, b: A| if b > a { b } else { a };
        let mut lanes = [A::ZERO; LANES];
        for values in values.chunks(LANES) {
            for (lane, &value) in lanes.iter_mut().zip(values) {
                *lane = larger(*lane, if value < A::ZERO { -value } else { value });
            }
        }
        let largest = lanes.into_iter().fold(A::ZERO, larger);
        // Avoids 0 / 0 in a block of zeros.
        let divisor = if largest > A::ZERO { largest } else { A::ONE };
        let mut ratios = [0.0; BLOCK];
        for (ratio, &value) in ratios.iter_mut().zip(values) {
            *ratio = (value / divisor).as_f64() as f32;
        }
        for (code, &ratio) in codes.iter_mut().zip(&ratios) {
            *code = book.code(ratio);
        }
        largest
    }
}
