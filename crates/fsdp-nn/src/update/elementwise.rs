//! The common part of element-wise update rules: one pass over the pieces of a shard in small blocks.

use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_core::Error;
use fsdp_core::Queue;
use fsdp_core::memory::{Slice, SliceMut};
use fsdp_core::scalars::GradientFactors;
use fsdp_core::update::{Piece, SegmentShard, StepScalars};

use super::finite_check::FiniteCheck;
use crate::host::element::Float;
use crate::host::floats::{Floats, transfer};
use crate::host::workers::TASK_ELEMS;
use crate::host::{HostBuffer, HostMemory};

/// Elements per block. The gradient of a block is converted to the master dtype on the stack.
const BLOCK_ELEMS: usize = 1024;

/// The scalars of a step, read from memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostScalars {
    pub(super) step: u64,
    pub(super) lr: f64,
    pub(super) gradient_scale: f64,
    pub(super) clip: f64,
}

impl HostScalars {
    /// Reads the scalars; `None` if the step must not update anything.
    pub(super) fn read(
        memory: &HostMemory,
        scalars: &StepScalars<'_, HostBuffer>,
    ) -> Result<Option<Self>, Error> {
        let GradientFactors { scale, clip, finite } =
            GradientFactors::read(memory, Queue::Compute, scalars.factors)?;
        let StepScalars { step, lr, .. } = *scalars;
        Ok(finite.then_some(Self { step, lr, gradient_scale: scale, clip }))
    }
}

/// The factors of a gradient, applied one after the other, in the master dtype.
#[derive(Clone, Copy)]
pub(super) struct Scale<A> {
    scale: A,
    clip: A,
}

impl<A: Float> Scale<A> {
    pub(super) fn new(scalars: &HostScalars) -> Self {
        Self { scale: A::of(scalars.gradient_scale), clip: A::of(scalars.clip) }
    }

    /// Returns the gradient of the mean loss, clipped.
    #[inline(always)]
    pub(super) fn of(self, gradient: A) -> A {
        gradient * self.scale * self.clip
    }
}

/// A range of one piece, of the parameters and of `N` state tensors, with the whole shard's gradient.
struct Task<'a, A, const N: usize> {
    start: usize,
    piece: Piece,
    params: &'a mut [A],
    state: [&'a mut [A]; N],
}

/// Runs `step(piece, gradient, parameters, states)` over blocks of every piece, and records whether all written
/// values are finite. The gradient is in the master dtype; `step` applies [`Scale`], which saves a pass.
pub(super) fn each_block<A: Float, const N: usize>(
    memory: &HostMemory,
    shard: &mut SegmentShard<'_, HostBuffer>,
    step: impl Fn(&Piece, &[A], &mut [A], [&mut [A]; N]) -> FiniteCheck<A> + Sync + Send,
) -> Result<(), Error> {
    let (limits, exceeds) = (FiniteCheck::finite(shard), AtomicBool::new(false));
    let gradient = memory.floats(Slice::whole(shard.gradient))?;
    let mut params = memory.elements_mut::<A>(SliceMut::whole(shard.params))?;
    let mut states = Vec::with_capacity(N);
    for buffer in shard.state.iter_mut() {
        states.push(memory.elements_mut::<A>(SliceMut::whole(buffer))?);
    }
    let mut states: [&mut [A]; N] = states.try_into().unwrap_or_else(|states: Vec<_>| {
        panic!("{} state tensors where the rule declared {N}", states.len())
    });
    let mut tasks = Vec::new();
    let mut position = 0;
    for piece in shard.pieces {
        assert!(piece.offset >= position, "pieces are disjoint and in order");
        skip(&mut params, piece.offset - position);
        for state in &mut states {
            skip(state, piece.offset - position);
        }
        for start in (0..piece.len).step_by(TASK_ELEMS) {
            let len = TASK_ELEMS.min(piece.len - start);
            let state = states.each_mut().map(|state| skip(state, len));
            tasks.push(Task {
                start: piece.offset + start,
                piece: *piece,
                params: skip(&mut params, len),
                state,
            });
        }
        position = piece.offset + piece.len;
    }
    memory.workers().each(tasks.into_iter(), |task| {
        run_task(gradient, task, |piece, gradient, params, state| {
            if step(piece, gradient, params, state).exceeds(&limits) {
                exceeds.store(true, Ordering::Relaxed);
            }
        });
    });
    if exceeds.into_inner() { shard.note_not_finite(memory) } else { Ok(()) }
}

/// Splits the first `count` elements off a slice.
pub(super) fn skip<'a, A>(slice: &mut &'a mut [A], count: usize) -> &'a mut [A] {
    let (first, rest) = std::mem::take(slice).split_at_mut(count);
    *slice = rest;
    first
}

fn run_task<A: Float, const N: usize>(
    gradient: Floats<'_>,
    task: Task<'_, A, N>,
    step: impl Fn(&Piece, &[A], &mut [A], [&mut [A]; N]),
) {
    let Task { start, piece, params, mut state } = task;
    let mut block = [A::ZERO; BLOCK_ELEMS];
    for (index, params) in params.chunks_mut(BLOCK_ELEMS).enumerate() {
        let (offset, len) = (index * BLOCK_ELEMS, params.len());
        let block = &mut block[..len];
        transfer(gradient.range(start + offset, len), A::floats_mut(block), false);
        step(&piece, block, params, state.each_mut().map(|state| &mut state[offset..offset + len]));
    }
}
