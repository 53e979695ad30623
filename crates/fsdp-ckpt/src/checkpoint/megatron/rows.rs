//! Cuts rows out of a matrix or vector in a stack, by its regions.

use std::{convert::Infallible, ops::Range};

use super::super::{Chunk, Key, Region, Tensor, for_each_box, packed_strides};

/// The tensor of the rows `ranges`, one after another, of the matrix or vector at `index` of a stack: the dimensions of the
/// stack, then rows, then any others. All ranges must be inside.
pub(super) fn rows_of(stack: &Tensor, index: &[u64], ranges: &[Range<u64>], path: Vec<Key>) -> Tensor {
    let rows = ranges.iter().map(|range| range.end - range.start).sum();
    let shape = [&[rows], &stack.shape[index.len() + 1..]].concat();
    let mut chunks = Vec::new();
    for chunk in &stack.chunks {
        for_each_box_of(stack, chunk, |held| {
            let mut first = 0;
            for range in ranges {
                chunks.extend(cut(&held, index, range, first, stack.dtype.size_bytes() as u64));
                first += range.end - range.start;
            }
        });
    }
    for chunk in &mut chunks {
        chunk.region = chunk.region.clone().simplified(&shape);
    }
    Tensor { path, role: stack.role, dtype: stack.dtype, shape, chunks }
}

/// A box of a tensor, and where its elements are.
struct Held {
    offsets: Vec<u64>,
    sizes: Vec<u64>,
    strides: Vec<u64>,
    source: usize,
    offset: u64,
}

/// Calls `each` with the boxes that make up a chunk.
fn for_each_box_of(tensor: &Tensor, chunk: &Chunk, mut each: impl FnMut(Held)) {
    let (source, offset) = (chunk.source, chunk.offset);
    match &chunk.region {
        Region::Box { offsets, sizes, strides } => {
            let (offsets, sizes, strides) = (offsets.clone(), sizes.clone(), strides.clone());
            each(Held { offsets, sizes, strides, source, offset });
        }
        Region::Flat(range) => {
            let strides = packed_strides(&tensor.shape);
            let whole = vec![0; tensor.shape.len()];
            let cut =
                for_each_box(&tensor.shape, (&whole, &tensor.shape), range.clone(), &mut |start, sizes| {
                    let flat: u64 = start.iter().zip(&strides).map(|(at, stride)| at * stride).sum();
                    let offset = offset + (flat - range.start) * tensor.dtype.size_bytes() as u64;
                    each(Held {
                        offsets: start.to_vec(),
                        sizes: sizes.to_vec(),
                        strides: strides.clone(),
                        source,
                        offset,
                    });
                    Ok::<_, Infallible>(())
                });
            cut.unwrap_or_else(|never| match never {});
        }
    }
}

/// What a box holds of the rows `range` at `index`, as a chunk of a tensor in which they begin at row `first`.
fn cut(held: &Held, index: &[u64], range: &Range<u64>, first: u64, size: u64) -> Option<Chunk> {
    let mut skipped = 0;
    for (dim, at) in index.iter().enumerate() {
        let inside = at.checked_sub(held.offsets[dim]).filter(|inside| *inside < held.sizes[dim])?;
        skipped += inside * held.strides[dim];
    }
    let dim = index.len();
    let rows = held.offsets[dim].max(range.start)..(held.offsets[dim] + held.sizes[dim]).min(range.end);
    if rows.is_empty() {
        return None;
    }
    skipped += (rows.start - held.offsets[dim]) * held.strides[dim];
    let region = Region::Box {
        offsets: [&[first + rows.start - range.start], &held.offsets[dim + 1..]].concat(),
        sizes: [&[rows.end - rows.start], &held.sizes[dim + 1..]].concat(),
        strides: held.strides[dim..].to_vec(),
    };
    Some(Chunk { region, source: held.source, offset: held.offset + skipped * size })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{checkpoint::Role, safetensors::TensorType};

    /// For each element of the tensor, its byte in the source.
    fn bytes(tensor: &Tensor) -> Vec<Option<u64>> {
        let mut found = vec![None; tensor.len() as usize];
        for chunk in &tensor.chunks {
            for_each_box_of(tensor, chunk, |held| {
                let count: u64 = held.sizes.iter().product();
                for mut number in 0..count {
                    let (mut flat, mut at, mut unit) = (0, held.offset, 1);
                    for dim in (0..held.sizes.len()).rev() {
                        let inside = number % held.sizes[dim];
                        number /= held.sizes[dim];
                        flat += (held.offsets[dim] + inside) * unit;
                        at += inside * held.strides[dim];
                        unit *= tensor.shape[dim];
                    }
                    assert_eq!(found[flat as usize].replace(at), None, "held twice");
                }
            });
        }
        found
    }

    proptest! {
        #[test]
        fn rows_of_a_stack_are_those_of_its_elements(
            (stack, rows, columns) in (1u64..4, 1u64..6, 1u64..5),
            (at, cut, start, len) in (0u64..4, 0u64..60, 0u64..6, 0u64..6),
            is_flat in any::<bool>(),
        ) {
            let shape = vec![stack, rows, columns];
            let chunk = |region, offset| Chunk { region, source: 0, offset };
            let chunks = if is_flat {
                let cut = cut.min(stack * rows * columns);
                vec![chunk(Region::Flat(cut..stack * rows * columns), 500), chunk(Region::Flat(0..cut), 7)]
            } else {
                // As tensor parallelism cuts columns; the first part is stored by columns.
                let cut = cut % (columns + 1);
                let first = Region::Box {
                    offsets: vec![0, 0, 0], sizes: vec![stack, rows, cut], strides: vec![rows * cut, 1, rows],
                };
                let rest = Region::packed(vec![0, 0, cut], vec![stack, rows, columns - cut]);
                vec![chunk(first, 0), chunk(rest, 500)]
            };
            let tensor = Tensor { path: vec![], role: Role::Model, dtype: TensorType::U8, shape, chunks };
            let (at, start) = (at % stack, start % rows);
            let ranges = [start..(start + len).min(rows), 0..start];
            let all = bytes(&tensor);
            let picked = rows_of(&tensor, &[at], &ranges, vec![]);
            let mut expected = Vec::new();
            for row in ranges.into_iter().flatten() {
                for column in 0..columns {
                    expected.push(all[((at * rows + row) * columns + column) as usize]);
                }
            }
            prop_assert_eq!(bytes(&picked), expected);
        }
    }
}
