//! Muon (Keller Jordan 2024), computed like `torch.optim.Muon` except for the dtype of its arithmetic: the direction
//! of the momentum is orthogonalized matrix by matrix. All parameters other than hidden matrices are updated by
//! AdamW.
//!
//! Momentum and direction are element-wise, so each rank computes them for its rows ([`UpdateRule::direct`]). The
//! direction is all-gathered; every rank with rows of a matrix orthogonalizes the whole matrix and updates its own
//! rows. The work is thus repeated on each of these ranks, and its bits depend on the shape only.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_core::update::{
    Piece, Products, RuleState, SegmentShard, StateAxis, StatePiece, StateTensor, StepScalars, UpdateRule,
};
use fsdp_core::{DType, Error};

use super::adamw::{AdamW, step as adamw_step};
use super::elementwise::{HostScalars, Scale, skip};
use super::finite_check::FiniteCheck;
use super::groups::GroupSettings;
use super::orthogonal::{Shape, orthogonalize};
use crate::host::element::Float;
use crate::host::floats::{Floats, transfer};
use crate::host::raw::vectorized;
use crate::host::workers::TASK_ELEMS;
use crate::host::{HostBuffer, HostMemory};

/// The factor of the learning rate for a matrix of `rows x cols`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdjustLr {
    /// The square root of rows / cols if above one: Keller Jordan's.
    Original,
    /// 0.2 times the square root of the longer side, so that updates have a root mean square near AdamW's:
    /// Moonlight's.
    MatchRmsAdamw,
}

impl AdjustLr {
    fn ratio(self, Shape { rows, cols }: Shape) -> f64 {
        match self {
            AdjustLr::Original => (rows as f64 / cols as f64).max(1.0).sqrt(),
            AdjustLr::MatchRmsAdamw => 0.2 * (rows.max(cols) as f64).sqrt(),
        }
    }
}

/// The options of [`Muon`].
#[derive(Clone, Debug)]
pub struct MuonOptions {
    /// Weight of the previous momentum.
    pub momentum: f64,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
    /// Minimum divisor when a direction is scaled to norm one.
    pub eps: f64,
    /// How the learning rate depends on the shape.
    pub adjust_lr: AdjustLr,
    /// The rule of all other parameters, and the parameter groups of all.
    pub adamw: AdamW,
}

/// Muon. State: `momentum_buffer` of orthogonalized matrices; `exp_avg` and `exp_avg_sq` of other parameters.
#[derive(Clone, Debug)]
pub struct Muon {
    pub(super) options: MuonOptions,
    /// Per parameter, its shape if it is orthogonalized.
    shapes: Vec<Option<Shape>>,
}

impl Muon {
    /// Creates the rule for the parameters of a model, of which `matrices` are orthogonalized.
    ///
    /// # Panics
    /// If one of these does not have two dimensions.
    pub fn new(options: MuonOptions, spec: &ModelSpec, matrices: &BTreeSet<ParamId>) -> Self {
        let shape = |id| {
            let param = spec.param(id);
            let [rows, cols] = param.shape[..] else { panic!("{} has not two dimensions", param.fqn) };
            (param.trainable && matrices.contains(&id)).then_some(Shape { rows, cols })
        };
        let ids = (0..spec.params.len()).map(ParamId);
        let shapes = ids.map(|id| if matrices.contains(&id) { shape(id) } else { None });
        Self { shapes: shapes.collect(), options }
    }

    /// Returns the hidden matrices of a model: two-dimensional parameters that only layers read, which excludes
    /// embeddings and heads.
    pub fn hidden_matrices(spec: &ModelSpec) -> BTreeSet<ParamId> {
        let matrices = (0..spec.params.len()).map(ParamId).filter(|&id| spec.param(id).shape.len() == 2);
        let outside =
            spec.blocks.iter().filter(|block| block.layer.is_none()).flat_map(|block| &block.params);
        let outside: BTreeSet<ParamId> = outside.copied().collect();
        matrices.filter(|id| !outside.contains(id)).collect()
    }

    pub(super) fn shape(&self, param: ParamId) -> Option<Shape> {
        self.shapes[param.0]
    }

    fn typed<A: Float>(
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
        let factors = self.options.adamw.factors(param, scalars.step, scalars.lr);
        let mut slopes = vec![A::ZERO; params.len()];
        transfer(gradient.range(start, slopes.len()), A::floats_mut(&mut slopes), false);
        adamw_step(factors, Scale::new(scalars), &slopes, params, mean, square)
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

impl RuleState for Muon {
    fn state(&self, pieces: &[Piece], _shard_len: usize, dtype: DType) -> Vec<StateTensor> {
        let of = |name, is_orthogonalized: bool| {
            let mut tensor = StateTensor { name, len: 0, dtype, pieces: Vec::new() };
            for piece in pieces.iter().filter(|piece| self.shape(piece.param).is_some() == is_orthogonalized)
            {
                let (offset, len) = (tensor.len, piece.len);
                let (axis, first) = (StateAxis::Elements, piece.param_offset);
                tensor.pieces.push(StatePiece { param: piece.param, axis, offset, len, first });
                tensor.len += len;
            }
            tensor
        };
        vec![of("momentum_buffer", true), of("exp_avg", false), of("exp_avg_sq", false)]
    }

    fn whole(&self) -> BTreeSet<ParamId> {
        (0..self.shapes.len()).map(ParamId).filter(|&id| self.shape(id).is_some()).collect()
    }

    fn scratch(&self) -> usize {
        self.shapes.iter().flatten().map(|shape| shape.scratch()).max().unwrap_or(0)
    }

    fn products(&self, pieces: &[Piece]) -> Vec<Products> {
        pieces.iter().filter_map(|piece| self.shape(piece.param)).flat_map(Shape::products).collect()
    }
}

impl UpdateRule<HostMemory> for Muon {
    fn direct(
        &mut self,
        memory: &HostMemory,
        shard: &mut SegmentShard<'_, HostBuffer>,
        scalars: &StepScalars<'_, HostBuffer>,
        direction: &mut HostBuffer,
    ) -> Result<(), Error> {
        let Some(scalars) = &HostScalars::read(memory, scalars)? else { return Ok(()) };
        match shard.params.dtype() {
            DType::F64 => self.momentum::<f64>(memory, shard, scalars, direction),
            _ => self.momentum::<f32>(memory, shard, scalars, direction),
        }
    }

    fn update(
        &mut self,
        memory: &HostMemory,
        shard: &mut SegmentShard<'_, HostBuffer>,
        scalars: &StepScalars<'_, HostBuffer>,
        _statistics: &[HostBuffer],
    ) -> Result<(), Error> {
        let Some(scalars) = &HostScalars::read(memory, scalars)? else { return Ok(()) };
        match shard.params.dtype() {
            DType::F64 => self.typed::<f64>(memory, shard, scalars)?,
            _ => self.typed::<f32>(memory, shard, scalars)?,
        }
        shard.refresh(memory)
    }
}
