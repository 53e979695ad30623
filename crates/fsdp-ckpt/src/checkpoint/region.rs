//! Regions of tensors: element counts, bounds checks, and the simplest form of each region.
//!
//! Nearly all boxes of real checkpoints are whole rows or whole tensors. They become flat ranges here, so that code
//! that moves bytes has one simple case to optimize.

use std::ops::Range;

/// The elements of a tensor that a chunk contains, and their layout in the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Region {
    /// A range of the tensor flattened in C order, stored contiguously. Covers whole rows, and flattened shards that
    /// start anywhere.
    Flat(Range<u64>),
    /// A box of the tensor; the element at index `i` of the box is stored `sum(i * strides)` elements after the first
    /// one.
    Box {
        /// First index in each dimension.
        offsets: Vec<u64>,
        /// Size in each dimension.
        sizes: Vec<u64>,
        /// Stride of each dimension, in elements.
        strides: Vec<u64>,
    },
}

impl Region {
    /// Returns a box whose elements are stored contiguously in C order.
    ///
    /// # Panics
    /// If `offsets` and `sizes` differ in length.
    pub fn packed(offsets: Vec<u64>, sizes: Vec<u64>) -> Region {
        assert_eq!(offsets.len(), sizes.len(), "a box has an offset and a size in each dimension");
        let strides = packed_strides(&sizes);
        Region::Box { offsets, sizes, strides }
    }

    /// Number of elements. `None` if it does not fit in 64 bits.
    pub fn len(&self) -> Option<u64> {
        match self {
            Region::Flat(range) => Some(range.end.saturating_sub(range.start)),
            Region::Box { sizes, .. } => element_count(sizes),
        }
    }

    /// Whether the region has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == Some(0)
    }

    /// Whether the region is inside a tensor of this shape, and a box has an offset, a size and a stride in each
    /// dimension. An empty region may be at the very end.
    pub fn is_inside(&self, shape: &[u64]) -> bool {
        match self {
            Region::Flat(range) => {
                range.start <= range.end && element_count(shape).is_some_and(|len| range.end <= len)
            }
            Region::Box { offsets, sizes, strides } => {
                strides.len() == shape.len() && is_box_inside(offsets, sizes, shape)
            }
        }
    }

    /// Returns the same elements in the same order, as a flat range if they are contiguous both in the tensor and in
    /// the source. An empty region becomes `Flat(0..0)`.
    ///
    /// The region must be inside a tensor of this shape; otherwise it is returned unchanged.
    pub fn simplified(self, shape: &[u64]) -> Region {
        if !self.is_inside(shape) {
            return self;
        }
        if self.is_empty() {
            return Region::Flat(0..0);
        }
        match &self {
            Region::Box { offsets, sizes, strides } if lies_packed(sizes, strides) => {
                flat_run(offsets, sizes, shape).map_or(self, Region::Flat)
            }
            _ => self,
        }
    }
}

/// Whether a box has an offset and a size in each dimension of this shape and is inside of it.
pub(crate) fn is_box_inside(offsets: &[u64], sizes: &[u64], shape: &[u64]) -> bool {
    let ends = offsets.iter().zip(sizes).map(|(offset, size)| offset.checked_add(*size));
    offsets.len() == shape.len()
        && sizes.len() == shape.len()
        && ends.zip(shape).all(|(end, dim)| end.is_some_and(|end| end <= *dim))
}

/// Number of elements of a tensor or box. `None` if it does not fit in 64 bits.
pub(crate) fn element_count(sizes: &[u64]) -> Option<u64> {
    if sizes.contains(&0) { Some(0) } else { sizes.iter().try_fold(1u64, |len, &size| len.checked_mul(size)) }
}

/// Size in bytes of a tensor with elements of `size` bytes. `None` if it does not fit in an `i64`, as file offsets
/// must, or an intermediate product overflows.
pub(crate) fn len_bytes(shape: &[u64], size: usize) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    let len = shape.iter().try_fold(size as u64, |len, &dim| len.checked_mul(dim))?;
    (len <= i64::MAX as u64).then_some(len)
}

/// Strides of a box whose elements are contiguous in C order.
pub(crate) fn packed_strides(sizes: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; sizes.len()];
    for dim in (1..sizes.len()).rev() {
        // Saturates, at what PyTorch can count, only for sizes that no file can contain: such a box is caught by its
        // length, or is empty and has no use for strides.
        strides[dim - 1] = sizes[dim].max(1).saturating_mul(strides[dim]).min(i64::MAX as u64);
    }
    strides
}

/// Whether a non-empty box is stored in C order in its source. Strides of dimensions of size 1 do not matter.
fn lies_packed(sizes: &[u64], strides: &[u64]) -> bool {
    let packed = packed_strides(sizes);
    sizes
        .iter()
        .zip(strides.iter().zip(packed))
        .all(|(size, (stride, packed))| *size == 1 || *stride == packed)
}

/// Returns the flat range of a non-empty box whose elements form one run of the tensor: it must span the tensor in
/// every dimension below the first one of size other than 1.
fn flat_run(offsets: &[u64], sizes: &[u64], shape: &[u64]) -> Option<std::ops::Range<u64>> {
    let first = sizes.iter().position(|size| *size != 1).unwrap_or(sizes.len());
    let spans = sizes.iter().zip(shape).skip(first + 1).all(|(size, dim)| size == dim);
    if !spans {
        return None;
    }
    let start = offsets.iter().zip(shape).fold(0, |flat, (offset, dim)| flat * dim + offset);
    Some(start..start + sizes.iter().product::<u64>())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Lists every element of a box as (flat index in the tensor, distance in the source), by counting.
    fn elements(offsets: &[u64], sizes: &[u64], strides: &[u64], shape: &[u64]) -> Vec<(u64, u64)> {
        let mut found = vec![(0, 0)];
        for dim in 0..shape.len() {
            let mut longer = Vec::new();
            for (flat, at) in found {
                for i in 0..sizes[dim] {
                    longer.push((flat * shape[dim] + offsets[dim] + i, at + i * strides[dim]));
                }
            }
            found = longer;
        }
        found
    }

    fn boxes() -> impl Strategy<Value = (Vec<u64>, Vec<u64>, Vec<u64>, Vec<u64>)> {
        let dim = (1u64..4).prop_flat_map(|dim| {
            (0..=dim).prop_flat_map(move |offset| (0..=dim - offset, Just((dim, offset)), 0u64..13))
        });
        prop::collection::vec(dim, 0..4).prop_flat_map(|dims| {
            let sizes: Vec<u64> = dims.iter().map(|d| d.0).collect();
            let packed = packed_strides(&sizes);
            let strides: Vec<u64> = dims.iter().map(|d| d.2).collect();
            let shape: Vec<u64> = dims.iter().map(|d| d.1.0).collect();
            let offsets: Vec<u64> = dims.iter().map(|d| d.1.1).collect();
            (Just(offsets), Just(sizes), prop_oneof![Just(strides), Just(packed)], Just(shape))
        })
    }

    proptest! {
        #[test]
        fn box_simplifies_to_flat_only_if_contiguous(
            (offsets, sizes, strides, shape) in boxes(),
        ) {
            let all = elements(&offsets, &sizes, &strides, &shape);
            let together = all.windows(2).all(|two| two[1].0 == two[0].0 + 1 && two[1].1 == two[0].1 + 1);
            let region = Region::Box { offsets, sizes, strides };
            prop_assert!(region.is_inside(&shape));
            prop_assert_eq!(region.len(), Some(all.len() as u64));
            let expected = match all.first() {
                None => Region::Flat(0..0),
                Some(first) if together => Region::Flat(first.0..first.0 + all.len() as u64),
                Some(_) => region.clone(),
            };
            prop_assert_eq!(region.simplified(&shape), expected);
        }
    }

    #[test]
    fn scalar_simplifies_to_one_flat_element() {
        assert_eq!(Region::packed(vec![], vec![]).simplified(&[]), Region::Flat(0..1));
    }

    #[test]
    fn regions_outside_their_tensor_are_detected() {
        let outside = Region::packed(vec![3, 0], vec![2, 4]);
        assert!(!outside.is_inside(&[4, 4]));
        assert_eq!(outside.clone().simplified(&[4, 4]), outside);
        assert!(!Region::packed(vec![0], vec![4]).is_inside(&[4, 4]));
        assert!(!Region::packed(vec![u64::MAX], vec![2]).is_inside(&[4]));
        assert!(!Region::Flat(0..17).is_inside(&[4, 4]));
        assert_eq!(Region::packed(vec![0, 0], vec![u64::MAX, 3]).len(), None);
    }

    #[test]
    fn packed_strides_match_torch() {
        assert_eq!(packed_strides(&[]), [] as [u64; 0]);
        assert_eq!(packed_strides(&[4, 3, 2]), [6, 2, 1]);
        assert_eq!(packed_strides(&[2, 0, 3]), [3, 3, 1]);
        // Of an empty tensor, they may be anything that PyTorch can count.
        assert_eq!(packed_strides(&[0, 1 << 62, 1 << 62]), [i64::MAX as u64, 1 << 62, 1]);
    }
}
