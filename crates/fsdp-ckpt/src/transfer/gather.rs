//! Reads strided elements: a box of a tensor that is not stored in the requested order.
//!
//! If the requested elements are dense in the source, the bytes that span them are read at once and sorted in memory.
//! Otherwise the box is halved along the dimension with the largest stride, until it is dense or a single run. Sharded
//! columns thus take a few large reads, and a transposed matrix larger than memory is still read in runs and never
//! element by element, as long as the caller requests large pieces of it.

use crate::error::Error;

/// Spans of up to this many bytes are always read at once, even if most of the bytes are not needed.
const SPAN_ALWAYS: u64 = 64 << 10;

/// Longer spans are read at once if at least one byte in this many is needed.
const WASTE_MAX: u64 = 4;

/// Number of elements moved by plain loops; larger blocks are halved first, so that both sides stay in the cache.
const LOOP_ELEMENTS: u64 = 4096;

/// A dimension of a box to move.
#[derive(Clone, Copy, Debug)]
struct Dim {
    size: u64,
    /// Stride in the source, in elements.
    from: u64,
    /// Stride in the output, in elements.
    to: u64,
}

/// A box of elements: its start on both sides, in elements, and its dimensions.
#[derive(Clone, Debug)]
pub(super) struct Block {
    from: u64,
    to: u64,
    dims: Vec<Dim>,
}

impl Block {
    /// Creates a box of a tensor of `shape` with the given `start` and `sizes`, in a chunk with `strides` that starts
    /// at `chunk_start`; its first element goes to `to` (in elements of the output).
    pub(super) fn new(
        start: &[u64],
        sizes: &[u64],
        chunk_start: &[u64],
        strides: &[u64],
        shape: &[u64],
        to: u64,
    ) -> Block {
        let mut dims = Vec::with_capacity(shape.len());
        let (mut from, mut row) = (0, 1);
        for dim in (0..shape.len()).rev() {
            from += (start[dim] - chunk_start[dim]) * strides[dim];
            dims.push(Dim { size: sizes[dim], from: strides[dim], to: row });
            row *= shape[dim];
        }
        dims.reverse();
        let mut block = Block { from, to, dims };
        block.merge();
        block
    }

    /// Drops dimensions of size 1, and joins adjacent dimensions that are contiguous on both sides.
    fn merge(&mut self) {
        self.dims.retain(|dim| dim.size != 1);
        let mut merged: Vec<Dim> = Vec::with_capacity(self.dims.len());
        for dim in self.dims.drain(..) {
            match merged.last_mut() {
                Some(outer) if outer.from == dim.size * dim.from && outer.to == dim.size * dim.to => {
                    *outer = Dim { size: outer.size * dim.size, ..dim };
                }
                _ => merged.push(dim),
            }
        }
        self.dims = merged;
    }

    fn len(&self) -> u64 {
        self.dims.iter().map(|dim| dim.size).product()
    }

    /// Number of source elements from the first to the last one of the box.
    fn span(&self) -> u64 {
        1 + self.dims.iter().map(|dim| (dim.size - 1) * dim.from).sum::<u64>()
    }

    /// Whether the box is one run on both sides.
    fn is_run(&self) -> bool {
        match self.dims.as_slice() {
            [] => true,
            [dim] => dim.from == 1 && dim.to == 1,
            _ => false,
        }
    }

    /// Splits the box into two halves along a dimension.
    fn halves(&self, dim: usize) -> [Block; 2] {
        let (mut first, mut second) = (self.clone(), self.clone());
        let half = self.dims[dim].size / 2;
        first.dims[dim].size = half;
        second.dims[dim].size -= half;
        second.from += half * self.dims[dim].from;
        second.to += half * self.dims[dim].to;
        first.merge();
        second.merge();
        [first, second]
    }

    /// Returns the dimension with the largest value of `measure`.
    fn largest(&self, measure: impl Fn(&Dim) -> u64) -> usize {
        (0..self.dims.len()).max_by_key(|&dim| measure(&self.dims[dim])).expect("one element is a run")
    }
}

/// Reads bytes of a source at a byte offset.
pub(super) type ReadBytes<'a> = dyn Fn(u64, &mut [u8]) -> Result<(), Error> + 'a;

/// Reads the elements of a block, of `size` bytes each, into `out`; `base` is the byte offset of the chunk in the
/// source. The length of `scratch` limits how much is read at once if elements are not in order.
pub(super) fn gather(
    block: &Block,
    size: usize,
    base: u64,
    source: &ReadBytes,
    scratch: &mut [u8],
    out: &mut [u8],
) -> Result<(), Error> {
    let bytes = |elements: u64| elements * size as u64;
    let position = |element: u64| bytes(element) as usize;
    let start = base + bytes(block.from);
    if block.is_run() {
        let to = position(block.to)..position(block.to + block.len());
        return source(start, &mut out[to]);
    }
    let span = bytes(block.span());
    let is_dense = span <= SPAN_ALWAYS || span / WASTE_MAX <= bytes(block.len());
    if is_dense && span <= scratch.len() as u64 {
        let read = &mut scratch[..span as usize];
        source(start, read)?;
        copy(&Block { from: 0, ..block.clone() }, size, read, out);
        return Ok(());
    }
    let [first, second] = block.halves(block.largest(|dim| dim.from));
    gather(&first, size, base, source, scratch, out)?;
    gather(&second, size, base, source, scratch, out)
}

/// Copies the elements of a block in memory.
fn copy(block: &Block, size: usize, from: &[u8], to: &mut [u8]) {
    if block.len() > LOOP_ELEMENTS && !block.dims.last().is_some_and(|dim| dim.from == 1 && dim.to == 1) {
        let [first, second] = block.halves(block.largest(|dim| dim.size));
        copy(&first, size, from, to);
        return copy(&second, size, from, to);
    }
    copy_dims(&block.dims, (block.from as usize * size, block.to as usize * size), size, from, to);
}

/// Copies by plain loops over the dimensions; offsets in bytes.
fn copy_dims(dims: &[Dim], (from_at, to_at): (usize, usize), size: usize, from: &[u8], to: &mut [u8]) {
    match dims {
        [] => to[to_at..to_at + size].copy_from_slice(&from[from_at..from_at + size]),
        [dim] if dim.from == 1 && dim.to == 1 => {
            let len = dim.size as usize * size;
            to[to_at..to_at + len].copy_from_slice(&from[from_at..from_at + len]);
        }
        [dim] => match size {
            1 => copy_elements::<1>(dim, (from_at, to_at), from, to),
            2 => copy_elements::<2>(dim, (from_at, to_at), from, to),
            4 => copy_elements::<4>(dim, (from_at, to_at), from, to),
            8 => copy_elements::<8>(dim, (from_at, to_at), from, to),
            _ => unreachable!("elements have 1, 2, 4 or 8 bytes"),
        },
        [outer, rest @ ..] => {
            let (from_step, to_step) = (outer.from as usize * size, outer.to as usize * size);
            for index in 0..outer.size as usize {
                copy_dims(rest, (from_at + index * from_step, to_at + index * to_step), size, from, to);
            }
        }
    }
}

fn copy_elements<const N: usize>(dim: &Dim, (from_at, to_at): (usize, usize), from: &[u8], to: &mut [u8]) {
    let (from_step, to_step) = (dim.from as usize * N, dim.to as usize * N);
    for index in 0..dim.size as usize {
        let (source, target) = (from_at + index * from_step, to_at + index * to_step);
        to[target..target + N].copy_from_slice(&from[source..source + N]);
    }
}
