//! Muon (Keller Jordan 2024), computed like `torch.optim.Muon` except for the dtype of its arithmetic: the direction
//! of the momentum is orthogonalized matrix by matrix. All parameters other than hidden matrices are updated by
//! AdamW.
//!
//! Momentum and direction are element-wise, so each rank computes them for its rows
//! ([`Stage::Direct`](fsdp_core::update::Stage::Direct)). The direction is all-gathered; every rank with rows of a matrix
//! orthogonalizes the whole matrix and updates its own rows. The work is thus repeated on each of these ranks, and its
//! bits depend on the shape only.

use std::collections::BTreeSet;

use fsdp_core::DType;
use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_core::update::{Piece, Products, StateAxis, StatePiece, StateTensor};

use super::adamw::AdamW;
use super::host::Shape;

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
    pub(super) fn ratio(self, Shape { rows, cols }: Shape) -> f64 {
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

    pub(super) fn state(&self, pieces: &[Piece], dtype: DType) -> Vec<StateTensor> {
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

    pub(super) fn whole(&self) -> BTreeSet<ParamId> {
        (0..self.shapes.len()).map(ParamId).filter(|&id| self.shape(id).is_some()).collect()
    }

    pub(super) fn scratch(&self) -> usize {
        self.shapes.iter().flatten().map(|shape| shape.scratch()).max().unwrap_or(0)
    }

    pub(super) fn products(&self, pieces: &[Piece]) -> Vec<Products> {
        pieces.iter().filter_map(|piece| self.shape(piece.param)).flat_map(Shape::products).collect()
    }
}
