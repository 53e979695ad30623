//! Distributions: which box of a tensor each coordinate of a mesh holds.
//!
//! The words are those of PyTorch's DTensor. Every axis of a mesh has a [`Placement`], and the axes act one after another,
//! from left to right. `Shard(dim)` cuts a dimension as `torch.chunk` does: into pieces of `ceil(size / ranks)`, of which
//! the last ones are shorter or empty. A strided shard (FSDP over tensor parallelism) precedes the plain shards of its
//! dimension in the list, but is applied after them.
//!
//! Axes have a number of ranks and no name here, because checkpoints of other programs have any number of axes, and most
//! do not say what they mean. Those of our own runs are named: [`Mesh`](crate::Mesh).

use std::ops::Range;

use crate::error::Error;

/// What each rank along one axis of a mesh holds of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// The same elements.
    Replicate,
    /// A summand of each element; the tensor is their sum.
    Partial,
    /// A piece of this dimension.
    Shard(usize),
    /// A piece of every piece that later axes cut from a dimension.
    StridedShard {
        /// The dimension.
        dim: usize,
        /// Number of pieces that later axes cut.
        split_factor: u64,
    },
}

/// The distribution of a tensor over a mesh. Every coordinate holds one box.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Distribution {
    shape: Vec<u64>,
    /// Number of ranks and placement of each axis, outermost first.
    axes: Vec<(u64, Placement)>,
}

impl Distribution {
    /// Distributes a tensor of this shape over axes, given by their number of ranks, outermost first.
    ///
    /// # Errors
    /// [`Error::Distribution`] if an axis has no ranks or shards a dimension that the tensor lacks, if the ranks cannot be
    /// counted, or if a coordinate would hold several boxes.
    pub fn new(shape: Vec<u64>, axes: Vec<(u64, Placement)>) -> Result<Self, Error> {
        let ranks: Vec<u64> = axes.iter().map(|axis| axis.0).collect();
        let refused = |what: String| Err(Error::Distribution { what });
        if ranks.contains(&0) {
            return refused(format!("its mesh {ranks:?} has no ranks"));
        }
        if ranks.iter().try_fold(1u64, |all, ranks| all.checked_mul(*ranks)).is_none() {
            return refused(format!("its mesh {ranks:?} has too many ranks"));
        }
        for (at, (_, placement)) in axes.iter().enumerate() {
            if let Some(dim) = placement.dim().filter(|dim| *dim >= shape.len()) {
                return refused(format!("dimension {dim} is sharded, but its shape is {shape:?}"));
            }
            if let Placement::StridedShard { dim, split_factor } = *placement
                && !is_one_box(&axes, at, dim, split_factor)
            {
                return refused(format!(
                    "a strided shard of dimension {dim} with split factor {split_factor} on the mesh {ranks:?} is not one box"
                ));
            }
        }
        Ok(Self { shape, axes })
    }

    /// Shape of the whole tensor.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Number of ranks and placement of each axis.
    pub fn axes(&self) -> &[(u64, Placement)] {
        &self.axes
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u64 {
        self.axes.iter().map(|axis| axis.0).product()
    }

    /// All coordinates, in the order of ranks.
    pub fn coordinates(&self) -> impl Iterator<Item = Vec<u64>> {
        (0..self.ranks()).map(|mut rank| {
            let mut coordinate = vec![0; self.axes.len()];
            for (at, (ranks, _)) in coordinate.iter_mut().zip(&self.axes).rev() {
                *at = rank % ranks;
                rank /= ranks;
            }
            coordinate
        })
    }

    /// The box at a coordinate, as one range per dimension.
    ///
    /// # Panics
    /// If the coordinate is outside of the mesh.
    pub fn local_box(&self, coordinate: &[u64]) -> Vec<Range<u64>> {
        assert_eq!(coordinate.len(), self.axes.len(), "a coordinate has a number per axis");
        let mut bounds: Vec<Range<u64>> = self.shape.iter().map(|size| 0..*size).collect();
        let (strided, plain): (Vec<_>, Vec<_>) =
            self.axes.iter().zip(coordinate).partition(|((_, placement), _)| placement.is_strided());
        for ((ranks, placement), at) in plain.into_iter().chain(strided) {
            assert!(at < ranks, "coordinate {at} is on an axis of {ranks} ranks");
            if let Some(dim) = placement.dim() {
                let Range { start, end } = bounds[dim];
                let piece = shard(end - start, *ranks, *at);
                bounds[dim] = start + piece.start..start + piece.end;
            }
        }
        bounds
    }
}

impl Placement {
    /// The dimension that is cut; `None` if none is.
    fn dim(self) -> Option<usize> {
        match self {
            Placement::Replicate | Placement::Partial => None,
            Placement::Shard(dim) | Placement::StridedShard { dim, .. } => Some(dim),
        }
    }

    fn is_strided(self) -> bool {
        matches!(self, Placement::StridedShard { .. })
    }
}

/// Whether the strided shard of axis `at` gives one box: the pieces that it cuts must be those of the plain shards to its
/// right, and no other axis may cut the dimension.
fn is_one_box(axes: &[(u64, Placement)], at: usize, dim: usize, split_factor: u64) -> bool {
    let others = |axes: &[(u64, Placement)]| {
        axes.iter().copied().filter(|axis| axis.1.dim() == Some(dim)).collect::<Vec<_>>()
    };
    let after = others(&axes[at + 1..]);
    others(&axes[..at]).is_empty()
        && after.iter().all(|axis| !axis.1.is_strided())
        && after.iter().map(|axis| axis.0).product::<u64>() == split_factor
}

/// The piece of this index of a dimension that is cut into so many as `torch.chunk` cuts it.
pub fn shard(len: u64, pieces: u64, index: u64) -> Range<u64> {
    let each = len.div_ceil(pieces);
    let at = |index: u64| index.saturating_mul(each).min(len);
    at(index)..at(index + 1)
}

#[cfg(test)]
mod tests;
