//! Proves that the chunks of a tensor contain each of its elements exactly once.
//!
//! The proof is exact, needs no data, and finds the first element (in C order) that is missing or stored twice. If all
//! regions are flat ranges, they are sorted and walked. Otherwise everything is converted to boxes (a flat range
//! becomes a few) and each dimension is swept in turn: between two adjacent cuts of a dimension the set of crossing
//! boxes is constant, so one sweep of the next dimension covers all indices in between. A grid of thousands of chunks
//! takes as many steps as it has chunks, times the number of dimensions.

use std::{convert::Infallible, ops::Range};

use super::{Checkpoint, Chunk, Region, Source, Tensor, boxes::for_each_box, join, region::element_count};
use crate::{
    error::{Error, listed},
    ranges::{CoverageFault, first_coverage_fault},
};

/// Maximum number of files in a message.
const LISTED_MAX: usize = 4;

impl Checkpoint {
    /// Proves that the chunks of every tensor contain each of its elements exactly once.
    ///
    /// # Errors
    /// As [`Tensor::check_coverage`], for the first incomplete tensor in name order.
    pub fn check_coverage(&self) -> Result<(), Error> {
        self.tensors.values().try_for_each(|tensor| tensor.check_coverage(&self.sources))
    }
}

impl Tensor {
    /// Proves that the chunks contain each element of the tensor exactly once, within their sources.
    ///
    /// # Errors
    /// [`Error::NotWhole`] with the first elements in C order that no chunk or more than one chunk contains;
    /// [`Error::Malformed`] if a chunk extends beyond the tensor or its file.
    ///
    /// # Panics
    /// If a chunk refers to a source that `sources` does not have.
    pub fn check_coverage(&self, sources: &[Source]) -> Result<(), Error> {
        let tensor = join(&self.path);
        for chunk in &self.chunks {
            self.check_chunk(chunk, &sources[chunk.source], &tensor)?;
        }
        let Some((elements, holders)) = first_fault(&self.shape, &self.chunks) else { return Ok(()) };
        let file = |chunk: usize| sources[self.chunks[chunk].source].path().display();
        let what = match holders {
            None => format!(
                "in none of its {}; a file or a rank is missing, or the checkpoint was not written to its end",
                self.files(sources)
            ),
            Some((first, second)) => format!(
                "held twice, by {} and by {}; files of different checkpoints may be mixed",
                file(first),
                file(second)
            ),
        };
        let index = index_text(&self.shape, elements.start);
        let reason = format!(
            "elements {}..{} (from index {index}) of tensor `{tensor}` of shape {:?} are {what}",
            elements.start, elements.end, self.shape
        );
        Err(Error::NotWhole { tensor, elements, reason })
    }

    fn check_chunk(&self, chunk: &Chunk, source: &Source, tensor: &str) -> Result<(), Error> {
        if !chunk.region.is_inside(&self.shape) {
            let (region, shape) = (&chunk.region, &self.shape);
            let reason = format!(
                "it holds {region:?} of tensor `{tensor}`, which has the shape {shape:?}; the file is damaged"
            );
            return Err(Error::malformed(source.path(), reason));
        }
        let len = source.len_max();
        let end = end_in_source(chunk, self.dtype.size_bytes() as u64);
        if end.is_none_or(|end| end > len) {
            let reason = format!(
                "a chunk of tensor `{tensor}` reaches beyond its {len} bytes; the file is truncated or damaged"
            );
            let (path, offset) = (source.path().clone(), Some(chunk.offset));
            return Err(Error::Malformed { path, offset, reason });
        }
        Ok(())
    }

    /// Lists the files of the chunks without duplicates, for messages.
    fn files(&self, sources: &[Source]) -> String {
        let mut files: Vec<_> =
            self.chunks.iter().map(|c| sources[c.source].path().display().to_string()).collect();
        files.sort();
        files.dedup();
        match files.len() {
            0 => "files".to_owned(),
            count => format!("{count} files ({})", listed(&files, LISTED_MAX)),
        }
    }
}

/// Formats the index of a flat element, as in `[3, 0]`.
fn index_text(shape: &[u64], mut flat: u64) -> String {
    let mut index: Vec<u64> = Vec::new();
    for dim in shape.iter().rev() {
        index.push(flat % dim.max(&1));
        flat /= dim.max(&1);
    }
    index.reverse();
    format!("{index:?}")
}

/// Returns the end offset of a chunk in its source. `None` if it does not fit in 64 bits.
fn end_in_source(chunk: &Chunk, element_bytes: u64) -> Option<u64> {
    if chunk.region.is_empty() {
        return Some(chunk.offset);
    }
    let elements = match &chunk.region {
        Region::Flat(range) => range.end - range.start,
        Region::Box { sizes, strides, .. } => {
            sizes.iter().zip(strides).try_fold(1u64, |end, (size, stride)| {
                size.checked_sub(1)?.checked_mul(*stride)?.checked_add(end)
            })?
        }
    };
    elements.checked_mul(element_bytes)?.checked_add(chunk.offset)
}

/// Elements with a fault, and the two chunks that both contain them; `None` instead of these if no chunk does.
type Fault = CoverageFault<usize>;

/// Returns the first fault in C order. All chunks must be inside the shape.
fn first_fault(shape: &[u64], chunks: &[Chunk]) -> Option<Fault> {
    let len = element_count(shape)?;
    if len == 0 {
        return None;
    }
    let mut flats = Vec::new();
    let mut boxes = Vec::new();
    for (index, chunk) in chunks.iter().enumerate() {
        match chunk.region.clone().simplified(shape) {
            Region::Flat(range) => flats.push((range, index)),
            Region::Box { offsets, sizes, .. } => {
                let bounds = offsets.iter().zip(&sizes).map(|(offset, size)| *offset..offset + size);
                boxes.push(Piece { chunk: index, bounds: bounds.collect() });
            }
        }
    }
    if boxes.is_empty() {
        return first_coverage_fault(len, flats);
    }
    for (range, chunk) in flats {
        let whole = (&vec![0; shape.len()][..], shape);
        let cut = for_each_box(shape, whole, range, &mut |start, sizes| {
            let bounds = start.iter().zip(sizes).map(|(start, size)| *start..start + size).collect();
            boxes.push(Piece { chunk, bounds });
            Ok::<_, Infallible>(())
        });
        cut.unwrap_or_else(|never| match never {});
    }
    // Dimensions of size 1 do not matter; without them, there are at most 64 dimensions.
    let wide: Vec<usize> = (0..shape.len()).filter(|dim| shape[*dim] != 1).collect();
    for piece in &mut boxes {
        piece.bounds = wide.iter().map(|dim| piece.bounds[*dim].clone()).collect();
    }
    let shape: Vec<u64> = wide.iter().map(|dim| shape[*dim]).collect();
    let all: Vec<&Piece> = boxes.iter().collect();
    first_box_fault(&shape, 0, &all, 0)
}

/// A box of a chunk.
struct Piece {
    chunk: usize,
    bounds: Vec<Range<u64>>,
}

/// Returns the first fault among the indices that share all dimensions before `dim`; `base` is the flat index of the
/// first of them. All pieces must cross them.
fn first_box_fault(shape: &[u64], dim: usize, pieces: &[&Piece], base: u64) -> Option<Fault> {
    let inner: u64 = shape[dim + 1..].iter().product();
    let mut waiting = pieces.to_vec();
    waiting.sort_by_key(|piece| std::cmp::Reverse((piece.bounds[dim].start, piece.chunk)));
    let mut crossing: Vec<&Piece> = Vec::new();
    let mut at = 0;
    while at < shape[dim] {
        crossing.retain(|piece| piece.bounds[dim].end > at);
        while let Some(piece) = waiting.pop_if(|piece| piece.bounds[dim].start <= at) {
            crossing.push(piece);
        }
        let ends = crossing.iter().map(|piece| piece.bounds[dim].end);
        let next =
            ends.chain(waiting.last().map(|piece| piece.bounds[dim].start)).min().unwrap_or(shape[dim]);
        let run = base + at * inner..base + next * inner;
        if crossing.is_empty() {
            return Some((run, None));
        }
        let fault = if dim + 1 < shape.len() {
            first_box_fault(shape, dim + 1, &crossing, run.start)
        } else {
            (crossing.len() > 1).then(|| (run, Some((crossing[0].chunk, crossing[1].chunk))))
        };
        if fault.is_some() {
            return fault;
        }
        at = next;
    }
    None
}

#[cfg(test)]
mod tests;
