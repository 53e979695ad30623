//! Computes the box of a tensor that a rank holds, from its coordinate in a device mesh and the placements of a
//! distributed tensor.
//!
//! `Shard(dim)` cuts a dimension into pieces of `ceil(size / ranks)`; the last ones are shorter or empty. Mesh
//! dimensions that shard the same tensor dimension cut it one after another, from left to right. A strided shard (FSDP
//! on top of tensor parallelism) precedes the plain shards in the list of placements but is applied after them.

use std::ops::Range;

/// How one mesh dimension distributes a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// Every rank holds the same elements.
    Replicate,
    /// Each rank holds one piece of a dimension.
    Shard {
        /// The tensor dimension.
        dim: usize,
    },
    /// Each rank holds a piece of every piece that later mesh dimensions cut.
    StridedShard {
        /// The tensor dimension.
        dim: usize,
        /// Number of pieces that later mesh dimensions cut.
        split_factor: u64,
    },
}

/// The distribution of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Distribution {
    /// Shape of the tensor.
    pub(crate) shape: Vec<u64>,
    /// Number of ranks in each mesh dimension.
    pub(crate) mesh: Vec<u64>,
    /// Placement of each mesh dimension.
    pub(crate) placements: Vec<Placement>,
}

impl Distribution {
    /// Checks that every coordinate of the mesh holds exactly one box.
    ///
    /// # Errors
    /// The reason if it does not.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.mesh.len() != self.placements.len() {
            let (dims, placements) = (self.mesh.len(), self.placements.len());
            return Err(format!("its mesh has {dims} dimensions, but there are {placements} placements"));
        }
        if self.mesh.contains(&0) {
            return Err(format!("its mesh {:?} has no ranks", self.mesh));
        }
        for (mesh_dim, placement) in self.placements.iter().enumerate() {
            match placement {
                Placement::Replicate => {}
                Placement::Shard { dim } | Placement::StridedShard { dim, .. }
                    if *dim >= self.shape.len() =>
                {
                    return Err(format!("dimension {dim} is sharded, but its shape is {:?}", self.shape));
                }
                Placement::Shard { .. } => {}
                Placement::StridedShard { dim, split_factor } => {
                    self.check_strided(mesh_dim, *dim, *split_factor)?;
                }
            }
        }
        Ok(())
    }

    /// Checks that a strided shard is one box, which it is only if the pieces it cuts are those of the plain shards to
    /// its right.
    fn check_strided(&self, mesh_dim: usize, dim: usize, split_factor: u64) -> Result<(), String> {
        let plain =
            self.placements.iter().zip(&self.mesh).enumerate().filter_map(|(at, (placement, ranks))| {
                (*placement == Placement::Shard { dim }).then_some((at, *ranks))
            });
        let (after, before): (Vec<_>, Vec<_>) = plain.partition(|(at, _)| *at > mesh_dim);
        let pieces = after.iter().map(|(_, ranks)| ranks).product::<u64>();
        let strided = |placement: &&Placement| matches!(placement, Placement::StridedShard { dim: other, .. } if *other == dim);
        if self.placements.iter().filter(strided).count() > 1 || !before.is_empty() || pieces != split_factor
        {
            return Err(format!(
                "a strided shard of dimension {dim} with split factor {split_factor} on the mesh {:?} is not \
                 one box",
                self.mesh
            ));
        }
        Ok(())
    }

    /// The box at a coordinate of the mesh, as one range per dimension.
    ///
    /// # Panics
    /// If [`Distribution::check`] fails or the coordinate is outside of the mesh.
    pub(crate) fn local_box(&self, coordinate: &[u64]) -> Vec<Range<u64>> {
        assert_eq!(coordinate.len(), self.mesh.len(), "a coordinate has a number per dimension of the mesh");
        let mut bounds: Vec<Range<u64>> = self.shape.iter().map(|size| 0..*size).collect();
        let mut cut = |dim: usize, mesh_dim: usize| {
            bounds[dim] = piece(bounds[dim].clone(), self.mesh[mesh_dim], coordinate[mesh_dim]);
        };
        for (mesh_dim, placement) in self.placements.iter().enumerate() {
            if let Placement::Shard { dim } = placement {
                cut(*dim, mesh_dim);
            }
        }
        for (mesh_dim, placement) in self.placements.iter().enumerate() {
            if let Placement::StridedShard { dim, .. } = placement {
                cut(*dim, mesh_dim);
            }
        }
        bounds
    }

    /// Whether the rank at this coordinate is the first of the ranks that hold the same box.
    pub(crate) fn is_first_replica(&self, coordinate: &[u64]) -> bool {
        let mut dims = self.placements.iter().zip(coordinate);
        dims.all(|(placement, at)| *placement != Placement::Replicate || *at == 0)
    }
}

/// The piece of this index when a range is cut as `torch.chunk` cuts it.
fn piece(range: Range<u64>, pieces: u64, index: u64) -> Range<u64> {
    let len = range.end - range.start;
    let each = len.div_ceil(pieces);
    let at = |index: u64| range.start + index.saturating_mul(each).min(len);
    at(index)..at(index + 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// All coordinates of a mesh.
    fn coordinates(mesh: &[u64]) -> Vec<Vec<u64>> {
        mesh.iter().fold(vec![vec![]], |all, ranks| {
            all.iter().flat_map(|at| (0..*ranks).map(move |i| [&at[..], &[i]].concat())).collect()
        })
    }

    /// Computes boxes by cutting lists of indices, one placement after another.
    fn slow_box(d: &Distribution, coordinate: &[u64]) -> Vec<Vec<u64>> {
        let mut indices: Vec<Vec<u64>> = d.shape.iter().map(|size| (0..*size).collect()).collect();
        for (mesh_dim, placement) in d.placements.iter().enumerate() {
            if let Placement::Shard { dim } = placement {
                let each = indices[*dim].len().div_ceil(d.mesh[mesh_dim] as usize).max(1);
                let mut chunks = indices[*dim].chunks(each).map(<[u64]>::to_vec);
                indices[*dim] = chunks.nth(coordinate[mesh_dim] as usize).unwrap_or_default();
            }
        }
        indices
    }

    fn distributions() -> impl Strategy<Value = Distribution> {
        let shape = prop::collection::vec(0u64..8, 0..4);
        (shape, prop::collection::vec(1u64..5, 0..4)).prop_flat_map(|(shape, mesh)| {
            let dims = shape.len();
            let placement = prop::option::of(0..dims.max(1)).prop_map(move |dim| match dim {
                Some(dim) if dims > 0 => Placement::Shard { dim },
                _ => Placement::Replicate,
            });
            let placements = prop::collection::vec(placement, mesh.len());
            (Just(shape), Just(mesh), placements).prop_map(|(shape, mesh, placements)| Distribution {
                shape,
                mesh,
                placements,
            })
        })
    }

    proptest! {
        #[test]
        fn local_box_matches_naive_sharding(d in distributions()) {
            d.check().unwrap();
            for at in coordinates(&d.mesh) {
                let expected = slow_box(&d, &at);
                let got: Vec<Vec<u64>> = d.local_box(&at).into_iter().map(Iterator::collect).collect();
                prop_assert_eq!(got, expected);
            }
        }

        #[test]
        fn first_replicas_cover_every_element_once(d in distributions()) {
            let mut held = 0;
            for at in coordinates(&d.mesh).iter().filter(|at| d.is_first_replica(at)) {
                held += d.local_box(at).iter().map(|range| range.end - range.start).product::<u64>();
            }
            prop_assert_eq!(held, d.shape.iter().product::<u64>());
        }
    }

    #[test]
    fn strided_shard_splits_after_plain_shard() {
        let placements =
            vec![Placement::StridedShard { dim: 0, split_factor: 2 }, Placement::Shard { dim: 0 }];
        let d = Distribution { shape: vec![8, 3], mesh: vec![2, 2], placements };
        d.check().unwrap();
        let rows: Vec<Range<u64>> =
            coordinates(&d.mesh).iter().map(|at| d.local_box(at)[0].clone()).collect();
        assert_eq!(rows, [0..2, 4..6, 2..4, 6..8]);
    }

    #[test]
    fn rejects_distributions_without_box() {
        let check = |shape: &[u64], mesh: &[u64], placements: &[Placement]| {
            Distribution { shape: shape.to_vec(), mesh: mesh.to_vec(), placements: placements.to_vec() }
                .check()
        };
        check(&[4], &[2], &[Placement::Shard { dim: 1 }]).unwrap_err();
        check(&[4], &[2, 2], &[Placement::Shard { dim: 0 }]).unwrap_err();
        check(&[4], &[0], &[Placement::Replicate]).unwrap_err();
        let strided = Placement::StridedShard { dim: 0, split_factor: 2 };
        check(&[8], &[2], &[strided]).unwrap_err();
        check(&[8], &[2, 4], &[strided, Placement::Shard { dim: 0 }]).unwrap_err();
        check(&[8], &[2, 2], &[Placement::Shard { dim: 0 }, strided]).unwrap_err();
        check(&[8], &[2, 2, 2], &[strided, strided, Placement::Shard { dim: 0 }]).unwrap_err();
    }
}
