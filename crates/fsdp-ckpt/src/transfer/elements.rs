//! Reads any run of elements of a tensor, in C order, from wherever its chunks are stored. Callers choose the length by
//! [`TensorReader::wants_large_pieces`] and never need a whole tensor.

use std::ops::Range;

use super::{
    gather::{Block, gather},
    parts::{Part, TensorReader, flat},
    sources::SourceFiles,
};
use crate::{
    checkpoint::{Chunk, Region, for_each_box},
    digest::Digest,
    error::Error,
};

/// A tensor that is read by one thread.
pub(crate) struct Reading<'a> {
    pub(crate) reader: &'a TensorReader<'a>,
    pub(crate) sources: &'a SourceFiles<'a>,
    /// Buffer for sorting strided elements; it grows to at most `scratch_max` bytes.
    pub(crate) scratch: &'a mut Vec<u8>,
    pub(crate) scratch_max: usize,
}

impl Reading<'_> {
    /// Reads `elements` of the tensor into `out`, which must have exactly their length. Returns the digest of these
    /// bytes if one was computed on the way.
    pub(crate) fn read(&mut self, elements: Range<u64>, out: &mut [u8]) -> Result<Option<Digest>, Error> {
        let TensorReader { name, .. } = *self.reader;
        let size = self.reader.size() as u64;
        assert_eq!(out.len() as u64, (elements.end - elements.start) * size, "the buffer holds the elements");
        for part in self.reader.parts_of(&elements) {
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
                    let digest = self.sources.read(*source, start, name, out)?;
                    if wanted == elements {
                        return Ok(digest);
                    }
                }
                Region::Box { .. } => self.read_box(part, wanted, elements.start, out)?,
            }
        }
        Ok(None)
    }

    /// Reads elements of a box to their positions in `out`, whose first element is `first`.
    fn read_box(&mut self, part: &Part, wanted: Range<u64>, first: u64, out: &mut [u8]) -> Result<(), Error> {
        let Chunk { region: Region::Box { offsets, sizes, strides }, source, offset } = &part.chunk else {
            unreachable!("only boxes are read as boxes");
        };
        let TensorReader { name, tensor, .. } = *self.reader;
        let (sources, size) = (self.sources, self.reader.size());
        // Never more than the span of the chunk, so that small tensors need small buffers.
        let chunk_bytes = part.source_len().saturating_mul(size as u64);
        let scratch_len = chunk_bytes.min(self.scratch_max as u64) as usize;
        if self.scratch.len() < scratch_len {
            self.scratch.resize(scratch_len, 0);
        }
        let scratch = &mut self.scratch[..scratch_len];
        let read = |at: u64, out: &mut [u8]| sources.read(*source, at, name, out).map(drop);
        for_each_box(&tensor.shape, (offsets, sizes), wanted, &mut |start, extent| {
            let to = flat(start, &tensor.shape) - first;
            let block = Block::new(start, extent, offsets, strides, &tensor.shape, to);
            gather(&block, size, *offset, &read, scratch, out)
        })
    }
}
