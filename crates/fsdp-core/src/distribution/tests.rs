//! Boxes, against a slow oracle that keeps the list of elements of every coordinate.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use Placement::{Partial, Replicate, Shard, StridedShard};

/// Cuts a list as `torch.chunk` does.
fn chunk(list: &[u64], pieces: u64, index: u64) -> Vec<u64> {
    let each = list.len().div_ceil(pieces as usize).max(1);
    list.chunks(each).nth(index as usize).map(<[u64]>::to_vec).unwrap_or_default()
}

/// The indices of each dimension at a coordinate: plain shards from left to right, then strided ones.
fn slow_indices(d: &Distribution, coordinate: &[u64]) -> Vec<Vec<u64>> {
    let mut indices: Vec<Vec<u64>> = d.shape().iter().map(|size| (0..*size).collect()).collect();
    for is_strided in [false, true] {
        for (&(ranks, placement), &at) in d.axes().iter().zip(coordinate) {
            match placement {
                Shard(dim) if !is_strided => indices[dim] = chunk(&indices[dim], ranks, at),
                StridedShard { dim, .. } if is_strided => indices[dim] = chunk(&indices[dim], ranks, at),
                _ => {}
            }
        }
    }
    indices
}

/// The flat numbers of the elements with these indices, in C order.
fn elements(shape: &[u64], indices: &[Vec<u64>]) -> Vec<u64> {
    indices.iter().zip(shape).fold(vec![0], |all, (indices, size)| {
        all.iter().flat_map(|at| indices.iter().map(move |index| at * size + index)).collect()
    })
}

fn boxed(d: &Distribution, coordinate: &[u64]) -> Vec<u64> {
    let indices: Vec<Vec<u64>> = d.local_box(coordinate).into_iter().map(Iterator::collect).collect();
    elements(d.shape(), &indices)
}

/// Up to three axes over a tensor of up to three dimensions, some of them empty, uneven or strided.
fn distributions() -> impl Strategy<Value = Distribution> {
    let axes = prop::collection::vec((1u64..5, 0u8..5, any::<prop::sample::Index>()), 0..4);
    (prop::collection::vec(0u64..8, 0..4), axes).prop_map(|(shape, axes)| {
        let mut placed: Vec<(u64, Placement)> = Vec::new();
        // From right to left, as the split factor of a strided shard counts the pieces to its right.
        for (ranks, kind, dim) in axes.into_iter().rev() {
            let dim = (!shape.is_empty()).then(|| dim.index(shape.len()));
            let after: Vec<_> = placed.iter().filter(|axis| axis.1.dim() == dim && dim.is_some()).collect();
            let split_factor = after.iter().map(|axis| axis.0).product();
            let is_cut = after.iter().any(|axis| axis.1.is_strided());
            placed.push((
                ranks,
                match (kind, dim) {
                    (1 | 2, Some(dim)) if !is_cut => Shard(dim),
                    (3, Some(dim)) if !is_cut => StridedShard { dim, split_factor },
                    (4, _) => Partial,
                    _ => Replicate,
                },
            ));
        }
        placed.reverse();
        Distribution::new(shape, placed).unwrap()
    })
}

proptest! {
    #[test]
    fn boxes_hold_the_elements_that_the_oracle_lists(d in distributions()) {
        for at in d.coordinates() {
            prop_assert_eq!(boxed(&d, &at), elements(d.shape(), &slow_indices(&d, &at)));
        }
    }

    #[test]
    fn different_boxes_hold_every_element_once(d in distributions()) {
        let boxes: BTreeSet<Vec<u64>> = d.coordinates().map(|at| boxed(&d, &at)).collect();
        let mut held: Vec<u64> = boxes.into_iter().flatten().collect();
        held.sort_unstable();
        prop_assert_eq!(held, (0..d.shape().iter().product()).collect::<Vec<u64>>());
    }

    #[test]
    fn coordinates_are_all_and_in_order_of_ranks(d in distributions()) {
        let all = d.axes().iter().fold(vec![vec![]], |all: Vec<Vec<u64>>, (ranks, _)| {
            all.iter().flat_map(|at| (0..*ranks).map(move |i| [&at[..], &[i]].concat())).collect()
        });
        prop_assert_eq!(d.coordinates().collect::<Vec<_>>(), all);
    }
}

/// If all cuts are even, a strided shard is what PyTorch says: the tensor is first cut into `split_factor` pieces, and the
/// rank has its part of each of them; later axes cut the parts joined together.
#[test]
fn even_strided_shard_is_a_part_of_each_piece() {
    let rows: Vec<u64> = (0..24).collect();
    for (data, tensor) in [(2, 2), (3, 4), (4, 3), (2, 6)] {
        let axes = vec![(data, StridedShard { dim: 0, split_factor: tensor }), (tensor, Shard(0))];
        let d = Distribution::new(vec![24], axes).unwrap();
        for at in d.coordinates() {
            let pieces = (0..tensor).map(|piece| chunk(&rows, tensor, piece));
            let parts: Vec<u64> = pieces.flat_map(|piece| chunk(&piece, data, at[0])).collect();
            assert_eq!(boxed(&d, &at), chunk(&parts, tensor, at[1]), "{at:?} of {data} x {tensor}");
        }
    }
}

#[test]
fn last_pieces_are_shorter_or_empty() {
    let pieces = |len, pieces| (0..pieces).map(|index| shard(len, pieces, index)).collect::<Vec<_>>();
    assert_eq!(pieces(7, 4), [0..2, 2..4, 4..6, 6..7]);
    assert_eq!(pieces(5, 4), [0..2, 2..4, 4..5, 5..5]);
    assert_eq!(pieces(0, 2), [0..0, 0..0]);
    assert_eq!(shard(u64::MAX, 3, 2), u64::MAX / 3 * 2..u64::MAX);
}

#[test]
fn distributions_without_one_box_are_refused() {
    let refused = |shape: &[u64], axes: &[(u64, Placement)]| {
        Distribution::new(shape.to_vec(), axes.to_vec()).unwrap_err().to_string()
    };
    assert_eq!(refused(&[4], &[(2, Shard(1))]), "dimension 1 is sharded, but its shape is [4]");
    assert_eq!(refused(&[4], &[(0, Replicate)]), "its mesh [0] has no ranks");
    assert_eq!(
        refused(&[4], &[(1 << 40, Replicate), (1 << 40, Replicate)]),
        "its mesh [1099511627776, 1099511627776] has too many ranks"
    );
    let strided = StridedShard { dim: 0, split_factor: 2 };
    let not_one_box = "a strided shard of dimension 0 with split factor 2 on the mesh ";
    for axes in [
        vec![(2, strided)],
        vec![(2, strided), (4, Shard(0))],
        vec![(2, Shard(0)), (2, strided), (2, Shard(0))],
        vec![(2, strided), (2, strided), (2, Shard(0))],
    ] {
        assert!(refused(&[8], &axes).starts_with(not_one_box), "{axes:?}");
    }
}
