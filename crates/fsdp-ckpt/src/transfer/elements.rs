//! Any run of elements of a tensor, read from wherever its chunks lie.
//!
//! A [`TensorReader`] is made once per tensor: chunks sorted by their first element, boxes that are runs in
//! disguise as flat ranges. It reads ranges of elements in C order, of any length; callers choose the length by
//! [`TensorReader::wants_large_pieces`] and never need a whole tensor.

use std::ops::Range;

use super::{
    gather::{Block, for_each_box, gather},
    sources::SourceFiles,
};
use crate::{
    checkpoint::{Chunk, Region, Tensor},
    digest::Digest,
    error::Error,
};

/// Where the elements of one tensor are, ready to be read.
#[derive(Debug)]
pub(crate) struct TensorReader<'a> {
    pub(crate) name: &'a str,
    pub(crate) tensor: &'a Tensor,
    parts: Vec<Part>,
    /// Per part, the largest end of it and all parts before: parts that end before a range are skipped.
    ends: Vec<u64>,
}

/// A chunk with the elements that it spans in the tensor.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) span: Range<u64>,
    pub(super) chunk: Chunk,
}

impl Part {
    /// Elements of the source from the first to the last one of the chunk.
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
    /// The tensor must have passed `check_coverage`.
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

    /// Bytes of one element.
    pub(crate) fn size(&self) -> usize {
        self.tensor.dtype.size_bytes()
    }

    /// Whether neighbours in the tensor lie far apart in a source (transposed chunks), so that reading it in
    /// small pieces would read the same bytes again and again.
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

    /// Reads `elements` of the tensor into `out`, which has exactly their length. Returns the digest of these
    /// bytes if one was computed on the way.
    pub(crate) fn read(
        &self,
        elements: Range<u64>,
        sources: &SourceFiles,
        scratch: &mut Vec<u8>,
        scratch_max: usize,
        out: &mut [u8],
    ) -> Result<Option<Digest>, Error> {
        let size = self.size() as u64;
        assert_eq!(out.len() as u64, (elements.end - elements.start) * size, "the buffer holds the elements");
        let first = self.ends.partition_point(|&end| end <= elements.start);
        for part in &self.parts[first..] {
            if part.span.start >= elements.end {
                break;
            }
            let wanted = elements.start.max(part.span.start)..elements.end.min(part.span.end);
            if wanted.is_empty() {
                continue;
            }
            let Chunk { region, source, offset } = &part.chunk;
            match region {
                Region::Flat(range) => {
                    let target = (wanted.start - elements.start) * size..(wanted.end - elements.start) * size;
                    let start = offset + (wanted.start - range.start) * size;
                    let out = &mut out[target.start as usize..target.end as usize];
                    let digest = sources.read(*source, start, self.name, out)?;
                    if wanted == elements {
                        return Ok(digest);
                    }
                }
                Region::Box { .. } => {
                    self.read_box(part, wanted, &elements, sources, scratch, scratch_max, out)?
                }
            }
        }
        Ok(None)
    }

    fn read_box(
        &self,
        part: &Part,
        wanted: Range<u64>,
        elements: &Range<u64>,
        sources: &SourceFiles,
        scratch: &mut Vec<u8>,
        scratch_max: usize,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let Chunk { region: Region::Box { offsets, sizes, strides }, source, offset } = &part.chunk else {
            unreachable!("only boxes are read as boxes");
        };
        let shape = &self.tensor.shape;
        // Never more than the chunk spans, so that small tensors need small buffers.
        let chunk_bytes = part.source_len().saturating_mul(self.size() as u64);
        let scratch_len = chunk_bytes.min(scratch_max as u64) as usize;
        if scratch.len() < scratch_len {
            scratch.resize(scratch_len, 0);
        }
        let scratch = &mut scratch[..scratch_len];
        let read = |at: u64, out: &mut [u8]| sources.read(*source, at, self.name, out).map(drop);
        for_each_box(shape, (offsets, sizes), wanted, &mut |start, extent| {
            let to = flat(start, shape) - elements.start;
            let block = Block::new(start, extent, offsets, strides, shape, to);
            gather(&block, self.size(), *offset, &read, scratch, out)
        })
    }
}

/// The elements of a tensor from the first to the last one of a region.
fn span(region: &Region, shape: &[u64]) -> Range<u64> {
    match region {
        Region::Flat(range) => range.clone(),
        Region::Box { offsets, sizes, .. } => {
            let last: Vec<u64> = offsets.iter().zip(sizes).map(|(offset, size)| offset + size - 1).collect();
            flat(offsets, shape)..flat(&last, shape) + 1
        }
    }
}

/// The position of an index in C order.
fn flat(index: &[u64], shape: &[u64]) -> u64 {
    index.iter().zip(shape).fold(0, |position, (index, dim)| position * dim + index)
}
