//! The locations of a tensor's elements, prepared for reading.
//!
//! A [`TensorReader`] is created once per tensor: its chunks are sorted by their first element, and boxes that are
//! contiguous become flat ranges.

use std::{collections::BTreeMap, ops::Range};

use crate::checkpoint::{Chunk, Region, Tensor};

/// The locations of the elements of one tensor, ready to be read.
#[derive(Debug)]
pub(crate) struct TensorReader<'a> {
    pub(crate) name: &'a str,
    pub(crate) tensor: &'a Tensor,
    parts: Vec<Part>,
    /// For each part, the largest end of it and all parts before it: used to skip parts that end before a range.
    ends: Vec<u64>,
}

/// A chunk, and the elements that it spans in the tensor.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) span: Range<u64>,
    pub(super) chunk: Chunk,
}

impl Part {
    /// Number of source elements from the first to the last one of the chunk.
    pub(super) fn source_len(&self) -> u64 {
        match &self.chunk.region {
            Region::Flat(range) => range.end - range.start,
            Region::Box { sizes, strides, .. } => {
                1 + sizes.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum::<u64>()
            }
        }
    }
}

impl<'a> TensorReader<'a> {
    /// Prepares a tensor for reading. It must have passed `check_coverage`.
    pub(crate) fn new(name: &'a str, tensor: &'a Tensor) -> TensorReader<'a> {
        let part = |chunk: &Chunk| {
            let region = chunk.region.clone().simplified(&tensor.shape);
            Part { span: span(&region, &tensor.shape), chunk: Chunk { region, ..chunk.clone() } }
        };
        let mut parts: Vec<Part> =
            tensor.chunks.iter().filter(|chunk| !chunk.region.is_empty()).map(part).collect();
        parts.sort_by_key(|part| (part.span.start, part.span.end));
        let ends = parts.iter().scan(0, |end: &mut u64, part| {
            *end = part.span.end.max(*end);
            Some(*end)
        });
        let ends = ends.collect();
        TensorReader { name, tensor, parts, ends }
    }

    pub(super) fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Returns the parts that may contain any of `elements`.
    pub(super) fn parts_of(&self, elements: &Range<u64>) -> impl Iterator<Item = &Part> {
        let (first, end) = (self.ends.partition_point(|&end| end <= elements.start), elements.end);
        self.parts[first..].iter().take_while(move |part| part.span.start < end)
    }

    /// Bytes per element.
    pub(crate) fn size(&self) -> usize {
        self.tensor.dtype.size_bytes()
    }

    /// Whether adjacent elements of the tensor are far apart in a source (transposed chunks), so that small pieces
    /// would read the same bytes repeatedly.
    pub(crate) fn wants_large_pieces(&self) -> bool {
        self.parts.iter().any(|part| match &part.chunk.region {
            Region::Flat(_) => false,
            Region::Box { sizes, strides, .. } => {
                let mut strides =
                    strides.iter().zip(sizes).filter(|(_, size)| **size > 1).map(|(stride, _)| stride);
                let mut last = strides.next();
                strides.any(|stride| last.replace(stride).is_some_and(|outer| outer < stride))
            }
        })
    }
}

/// Returns the length of each source that tensors need, in bytes from its start.
pub(crate) fn needed<'a>(
    readers: impl Iterator<Item = &'a TensorReader<'a>>,
    is_wanted: impl Fn(usize) -> bool,
) -> BTreeMap<usize, u64> {
    let mut needed = BTreeMap::new();
    for reader in readers {
        for part in reader.parts().iter().filter(|part| is_wanted(part.chunk.source)) {
            let end: &mut u64 = needed.entry(part.chunk.source).or_default();
            *end = (*end).max(part.chunk.offset + part.source_len() * reader.size() as u64);
        }
    }
    needed
}

/// Returns the elements of a tensor from the first to the last one of a region.
fn span(region: &Region, shape: &[u64]) -> Range<u64> {
    match region {
        Region::Flat(range) => range.clone(),
        Region::Box { offsets, sizes, .. } => {
            let last: Vec<u64> = offsets.iter().zip(sizes).map(|(offset, size)| offset + size - 1).collect();
            flat(offsets, shape)..flat(&last, shape) + 1
        }
    }
}

/// Returns the position of an index in C order.
pub(super) fn flat(index: &[u64], shape: &[u64]) -> u64 {
    index.iter().zip(shape).fold(0, |position, (index, dim)| position * dim + index)
}
