//! Muon's update: orthogonalized directions for this rank's rows of matrices, AdamW for all other parameters.

use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_core::Error;
use fsdp_core::memory::{Slice, SliceMut};
use fsdp_core::model::ParamId;
use fsdp_core::update::{Piece, SegmentShard};

use super::finite_check::FiniteCheck;
use super::orthogonal::{Shape, orthogonalize};
use super::pass::{HostScalars, Scale, factors, skip, step};
use crate::host::element::Float;
use crate::host::floats::{Floats, transfer};
use crate::host::raw::vectorized;
use crate::host::workers::TASK_ELEMS;
use crate::host::{HostBuffer, HostMemory};
use crate::update::groups::GroupSettings;
use crate::update::muon::Muon;

impl Muon {
    pub(super) fn typed<A: Float>(
        &self,
        memory: &HostMemory,
        shard: &mut SegmentShard<'_, HostBuffer>,
        scalars: &HostScalars,
    ) -> Result<(), Error> {
        let (limits, exceeds) = (FiniteCheck::finite(shard), AtomicBool::new(false));
        let gradient = memory.floats(Slice::whole(shard.gradient))?;
        let (rows, elements) = self.tasks::<A>(memory, shard.params, shard.state, shard.pieces)?;
        memory.workers().each(elements.into_iter(), |task| {
            if self.adamw::<A>(task, gradient, scalars).exceeds(&limits) {
                exceeds.store(true, Ordering::Relaxed);
            }
        });
        for Rows { piece, shape, params } in rows {
            let gathered = shard.whole.as_mut().expect("the engine gathers the directions of all matrices");
            let from = gathered.start + piece.offset - piece.param_offset;
            let direction = memory.floats(Slice::new(gathered.directions, from, shape.len()))?;
            let scratch = memory.elements_mut::<A>(SliceMut::whole(gathered.scratch))?;
            let update = orthogonalize(memory.workers(), shape, direction, self.options.eps, scratch);
            let GroupSettings { lr_scale, weight_decay, .. } = self.options.adamw.groups.of(piece.param);
            let lr = scalars.lr * lr_scale;
            let factors = [1.0 - lr * weight_decay, -(lr * self.options.adjust_lr.ratio(shape))];
            let update = &update[piece.param_offset..][..piece.len];
            if apply(factors.map(A::of), update, params).exceeds(&limits) {
                exceeds.store(true, Ordering::Relaxed);
            }
        }
        if exceeds.into_inner() { shard.note_not_finite(memory) } else { Ok(()) }
    }

    /// Splits the work on a shard: rows of matrices, and parts of other pieces.
    fn tasks<'a, A: Float>(
        &self,
        memory: &HostMemory,
        params: &'a mut HostBuffer,
        state: &'a mut [HostBuffer],
        pieces: &'a [Piece],
    ) -> Result<Tasks<'a, A>, Error> {
        let mut params = memory.elements_mut::<A>(SliceMut::whole(params))?;
        let count = state.len();
        let [_, mean, square] = state else { panic!("{count} state tensors where the rule declared 3") };
        let mut mean = memory.elements_mut::<A>(SliceMut::whole(mean))?;
        let mut square = memory.elements_mut::<A>(SliceMut::whole(square))?;
        let (mut rows, mut elements, mut position) = (Vec::new(), Vec::new(), 0);
        for piece in pieces {
            skip(&mut params, piece.offset - position);
            position = piece.offset + piece.len;
            if let Some(shape) = self.shape(piece.param) {
                rows.push(Rows { piece, shape, params: skip(&mut params, piece.len) });
                continue;
            }
            for start in (0..piece.len).step_by(TASK_ELEMS) {
                let len = TASK_ELEMS.min(piece.len - start);
                let [params, mean, square] = [&mut params, &mut mean, &mut square].map(|all| skip(all, len));
                elements.push(Elements {
                    param: piece.param,
                    start: piece.offset + start,
                    params,
                    mean,
                    square,
                });
            }
        }
        Ok((rows, elements))
    }

    /// Updates a part of a parameter that is not orthogonalized.
    fn adamw<A: Float>(
        &self,
        task: Elements<'_, A>,
        gradient: Floats<'_>,
        scalars: &HostScalars,
    ) -> FiniteCheck<A> {
        let Elements { param, start, params, mean, square } = task;
        let factors = factors::<A>(&self.options.adamw, param, scalars);
        let mut slopes = vec![A::ZERO; params.len()];
        transfer(gradient.range(start, slopes.len()), A::floats_mut(&mut slopes), false);
        step(&self.options.adamw, &factors, Scale::new(scalars), &slopes, params, &mut [mean, square])
    }
}

/// The work on a shard: rows of matrices, and parts of other parameters.
type Tasks<'a, A> = (Vec<Rows<'a, A>>, Vec<Elements<'a, A>>);

/// This rank's rows of a matrix.
struct Rows<'a, A> {
    piece: &'a Piece,
    shape: Shape,
    params: &'a mut [A],
}

/// A part of a piece of another parameter, with its moments.
struct Elements<'a, A> {
    param: ParamId,
    /// Offset of its first element within the shard.
    start: usize,
    params: &'a mut [A],
    mean: &'a mut [A],
    square: &'a mut [A],
}

vectorized! {
    fn apply<A: Float>(factors: [A; 2], update: &[A], params: &mut [A]) -> FiniteCheck<A> {
        let ([keep, step_size], mut largest) = (factors, FiniteCheck::none());
        for (p, &update) in params.iter_mut().zip(update) {
            *p = *p * keep + step_size * update;
            largest.param(*p);
        }
        largest
    }
}
