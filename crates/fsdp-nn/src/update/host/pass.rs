//! The common part of element-wise update rules: one pass over the pieces of a shard in small blocks.

use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_core::memory::{Buffer, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::model::ParamId;
use fsdp_core::scalars::GradientFactors;
use fsdp_core::update::{SegmentShard, StepScalars};
use fsdp_core::{DType, Error, Queue};

use super::finite_check::FiniteCheck;
use crate::host::element::Float;
use crate::host::floats::{Floats, transfer};
use crate::host::raw::vectorized;
use crate::host::workers::TASK_ELEMS;
use crate::host::{HostBuffer, HostMemory};
use crate::update::elementwise::{Elementwise, ElementwiseRule, STATES_MAX};

/// Elements per block. The gradient of a block is converted to the master dtype on the stack.
const BLOCK_ELEMS: usize = 1024;

/// The scalars of a step, read from memory.
#[derive(Clone, Copy, Debug)]
pub struct HostScalars {
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
        let mut factors = [0.0; GradientFactors::LEN];
        memory.read(Queue::Compute, scalars.factors, HostSliceMut::F64(&mut factors))?;
        let GradientFactors { scale, clip, finite } = GradientFactors::from_array(factors);
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

/// A range of one piece, of the parameters and of the state tensors, with the whole shard's gradient.
struct Task<'a, A> {
    start: usize,
    param: ParamId,
    params: &'a mut [A],
    state: Vec<&'a mut [A]>,
}

/// Calls the rule with each element of a block, and the state tensors that it has; the others are zeros.
macro_rules! each_element {
    ($rule:ident, $factors:ident, $scale:ident, $gradient:ident, $params:ident, [$($state:ident $index:literal),*]) => {{
        let mut largest = FiniteCheck::none();
        let len = $params.len();
        assert!($gradient.len() == len $(&& $state.len() == len)*, "a block has one length");
        for i in 0..len {
            let mut state = [A::ZERO; STATES_MAX];
            $(state[$index] = $state[i];)*
            $params[i] = $rule.step($factors, $scale.of($gradient[i]), $params[i], &mut state);
            largest.param($params[i]);
            $(
                $state[i] = state[$index];
                largest.state(state[$index]);
            )*
        }
        largest
    }};
}

vectorized! {
    /// Updates a block. The gradient is in the master dtype and not scaled yet, which saves a pass.
    pub(super) fn step<A: Float, R: Elementwise>(
        rule: &R,
        factors: &[A],
        scale: Scale<A>,
        gradient: &[A],
        params: &mut [A],
        state: &mut [&mut [A]],
    ) -> FiniteCheck<A> {
        let count = state.len();
        match state {
            [] => each_element!(rule, factors, scale, gradient, params, []),
            [a] => each_element!(rule, factors, scale, gradient, params, [a 0]),
            [a, b] => each_element!(rule, factors, scale, gradient, params, [a 0, b 1]),
            [a, b, c] => each_element!(rule, factors, scale, gradient, params, [a 0, b 1, c 2]),
            _ => panic!("{count} state tensors where a rule has at most {STATES_MAX}"),
        }
    }
}

/// The factors of a step for a parameter, in the master dtype.
pub(super) fn factors<A: Float>(
    rule: &impl ElementwiseRule,
    param: ParamId,
    scalars: &HostScalars,
) -> Vec<A> {
    rule.factors_of(param, scalars.step, scalars.lr).into_iter().map(A::of).collect()
}

/// Applies a rule to blocks of every piece, and records whether all written values are finite.
pub(in crate::update) fn each_block<R: Elementwise>(
    rule: &R,
    memory: &HostMemory,
    shard: &mut SegmentShard<'_, HostBuffer>,
    scalars: &HostScalars,
) -> Result<(), Error> {
    match shard.params.dtype() {
        DType::F64 => typed::<f64, R>(rule, memory, shard, scalars),
        _ => typed::<f32, R>(rule, memory, shard, scalars),
    }
}

fn typed<A: Float, R: Elementwise>(
    rule: &R,
    memory: &HostMemory,
    shard: &mut SegmentShard<'_, HostBuffer>,
    scalars: &HostScalars,
) -> Result<(), Error> {
    let (limits, exceeds) = (FiniteCheck::finite(shard), AtomicBool::new(false));
    let gradient = memory.floats(Slice::whole(shard.gradient))?;
    let tasks = tasks::<A>(memory, shard)?;
    let scale = Scale::<A>::new(scalars);
    memory.workers().each(tasks.into_iter(), |task| {
        let factors = factors(rule, task.param, scalars);
        run_task(gradient, task, |gradient, params, state| {
            if step(rule, &factors, scale, gradient, params, state).exceeds(&limits) {
                exceeds.store(true, Ordering::Relaxed);
            }
        });
    });
    if exceeds.into_inner() { shard.note_not_finite(memory) } else { Ok(()) }
}

/// Splits the pieces of a shard.
fn tasks<'a, A: Float>(
    memory: &HostMemory,
    shard: &'a mut SegmentShard<'_, HostBuffer>,
) -> Result<Vec<Task<'a, A>>, Error> {
    let mut params = memory.elements_mut::<A>(SliceMut::whole(shard.params))?;
    let mut states = Vec::new();
    for buffer in shard.state.iter_mut() {
        states.push(memory.elements_mut::<A>(SliceMut::whole(buffer))?);
    }
    let (mut tasks, mut position) = (Vec::new(), 0);
    for piece in shard.pieces {
        assert!(piece.offset >= position, "pieces are disjoint and in order");
        let gap = piece.offset - position;
        skip(&mut params, gap);
        for state in &mut states {
            skip(state, gap);
        }
        for start in (0..piece.len).step_by(TASK_ELEMS) {
            let len = TASK_ELEMS.min(piece.len - start);
            let state = states.iter_mut().map(|state| skip(state, len)).collect();
            let params = skip(&mut params, len);
            tasks.push(Task { start: piece.offset + start, param: piece.param, params, state });
        }
        position = piece.offset + piece.len;
    }
    Ok(tasks)
}

/// Splits the first `count` elements off a slice.
pub(super) fn skip<'a, A>(slice: &mut &'a mut [A], count: usize) -> &'a mut [A] {
    let (first, rest) = std::mem::take(slice).split_at_mut(count);
    *slice = rest;
    first
}

fn run_task<A: Float>(
    gradient: Floats<'_>,
    task: Task<'_, A>,
    step: impl Fn(&[A], &mut [A], &mut [&mut [A]]),
) {
    let Task { start, params, mut state, .. } = task;
    let mut block = [A::ZERO; BLOCK_ELEMS];
    for (index, params) in params.chunks_mut(BLOCK_ELEMS).enumerate() {
        let (offset, len) = (index * BLOCK_ELEMS, params.len());
        let block = &mut block[..len];
        transfer(gradient.range(start + offset, len), A::floats_mut(block), false);
        let mut state: Vec<&mut [A]> =
            state.iter_mut().map(|state| &mut state[offset..offset + len]).collect();
        step(block, params, &mut state);
    }
}
