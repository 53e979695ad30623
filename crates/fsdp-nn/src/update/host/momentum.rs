//! The element-wise part of [`Muon`]: momentum, and the direction to be orthogonalized.

use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_core::Error;
use fsdp_core::memory::{Slice, SliceMut};
use fsdp_core::update::SegmentShard;

use super::finite_check::FiniteCheck;
use super::pass::{HostScalars, Scale, skip};
use crate::host::element::Float;
use crate::host::floats::{Target, transfer};
use crate::host::raw::vectorized;
use crate::host::workers::TASK_ELEMS;
use crate::host::{HostBuffer, HostMemory};
use crate::update::muon::{Muon, MuonOptions};

/// Number of elements whose gradient is converted to the master dtype at a time.
const BLOCK_ELEMS: usize = 1024;

/// Linear interpolation like `torch.lerp`: computed from the nearer end.
#[derive(Clone, Copy)]
struct Lerp {
    weight: f64,
}

impl Lerp {
    #[inline(always)]
    fn of<A: Float>(self, from: A, to: A) -> A {
        if self.weight.abs() < 0.5 {
            from + A::of(self.weight) * (to - from)
        } else {
            to - (to - from) * (A::ONE - A::of(self.weight))
        }
    }
}

/// The interpolations from the gradient to momentum and direction.
#[derive(Clone, Copy)]
struct Weights {
    momentum: Lerp,
    nesterov: Option<Lerp>,
}

impl Weights {
    fn of(options: &MuonOptions) -> Self {
        let nesterov = options.nesterov.then_some(Lerp { weight: options.momentum });
        Self { momentum: Lerp { weight: 1.0 - options.momentum }, nesterov }
    }
}

vectorized! {
    fn advance<A: Float>(
        weights: Weights,
        scale: Scale<A>,
        gradient: &[A],
        momentum: &mut [A],
        direction: &mut [A],
    ) -> FiniteCheck<A> {
        let mut largest = FiniteCheck::none();
        for ((m, d), &g) in momentum.iter_mut().zip(direction).zip(gradient) {
            let g = scale.of(g);
            *m = weights.momentum.of(*m, g);
            *d = weights.nesterov.map_or(*m, |nesterov| nesterov.of(g, *m));
            largest.state(*m);
        }
        largest
    }
}

impl Muon {
    /// Advances the momentum of this rank's rows of matrices, and writes their directions.
    pub(super) fn momentum<A: Float>(
        &self,
        memory: &HostMemory,
        shard: &mut SegmentShard<'_, HostBuffer>,
        scalars: &HostScalars,
        direction: &mut HostBuffer,
    ) -> Result<(), Error> {
        let (limits, exceeds) = (FiniteCheck::finite(shard), AtomicBool::new(false));
        let (scale, weights) = (Scale::<A>::new(scalars), Weights::of(&self.options));
        let gradient = memory.floats(Slice::whole(shard.gradient))?;
        let mut momentum = memory.elements_mut::<A>(SliceMut::whole(&mut shard.state[0]))?;
        for piece in shard.pieces.iter().filter(|piece| self.shape(piece.param).is_some()) {
            let data = memory.floats_mut(SliceMut::new(direction, piece.offset, piece.len))?;
            let parts = Target { data, accumulate: false }.parts(TASK_ELEMS);
            let momentum = skip(&mut momentum, piece.len).chunks_mut(TASK_ELEMS);
            memory.workers().each(parts.zip(momentum).enumerate(), |(index, (mut target, momentum))| {
                let [mut block, mut slopes] = [[A::ZERO; BLOCK_ELEMS]; 2];
                for (at, momentum) in momentum.chunks_mut(BLOCK_ELEMS).enumerate() {
                    let (offset, len) = (at * BLOCK_ELEMS, momentum.len());
                    let (block, slopes) = (&mut block[..len], &mut slopes[..len]);
                    let start = piece.offset + index * TASK_ELEMS + offset;
                    transfer(gradient.range(start, len), A::floats_mut(slopes), false);
                    if advance(weights, scale, slopes, momentum, block).exceeds(&limits) {
                        exceeds.store(true, Ordering::Relaxed);
                    }
                    target.put(offset, block);
                }
            });
        }
        if exceeds.into_inner() { shard.note_not_finite(memory) } else { Ok(()) }
    }
}
