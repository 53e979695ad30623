//! Tables that differ between ranks. Programs are the same on all ranks; kernels that work on shards take these tables.

use super::{Products, RuleState, StateTensor};
use crate::dtype::DType;
use crate::layout::{Layout, Piece};
use crate::memory::Rows;
use crate::mesh::{Axis, Mesh};
use crate::rank::Rank;
use crate::wrap::UnitId;

/// The contents of a rank's shards.
#[derive(Clone, Debug)]
pub struct RankTables {
    units: Vec<UnitTables>,
}

/// The contents of a rank's shards of one unit.
#[derive(Clone, Debug)]
pub struct UnitTables {
    /// The pieces in the shard of each segment.
    pub pieces: Vec<Vec<Piece>>,
    /// The rows of each trainable segment whose gradients count toward the norm. Replicas hold equal gradients, so
    /// only those of the first replica count.
    pub measured: Vec<Vec<Rows>>,
    /// The optimizer's state tensors for each trainable segment.
    pub state: Vec<Vec<StateTensor>>,
    /// The matrix products in an update of the unit.
    pub products: Vec<Products>,
}

impl RankTables {
    /// Computes the tables of a rank whose trained parameters are kept in `dtype`.
    pub(crate) fn new(layout: &Layout, mesh: Mesh, dtype: DType, rule: &dyn RuleState, rank: Rank) -> Self {
        let (shard, replica) = (mesh.shard(rank), mesh.coordinate(rank, Axis::Replicate));
        let units = layout.units.iter().map(|unit| {
            let pieces: Vec<Vec<Piece>> = unit.segments.iter().map(|segment| segment.pieces(shard)).collect();
            let trained = || unit.trainable_segments().zip(&pieces);
            let state =
                trained().map(|(segment, pieces)| rule.state(pieces, segment.shard_len(), dtype)).collect();
            let products = trained().flat_map(|(_, pieces)| rule.products(pieces)).collect();
            let counted = |(_, pieces): (_, &Vec<Piece>)| match replica {
                0 => pieces.iter().map(Piece::rows).collect(),
                _ => Vec::new(),
            };
            let measured = trained().map(counted).collect();
            UnitTables { pieces, measured, state, products }
        });
        Self { units: units.collect() }
    }

    /// Returns the tables of a unit.
    pub fn unit(&self, unit: UnitId) -> &UnitTables {
        &self.units[unit.0]
    }
}
