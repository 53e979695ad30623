//! Cuts weights of single experts out of a stack, and stacks them, by their regions.

use std::collections::BTreeMap;

use super::super::{Chunk, Key, Region, Role, Tensor, join};

/// The weights of a stack, by expert and slot, each with the number of slots of an expert.
pub(super) type Weights = BTreeMap<(u64, usize), (usize, Tensor)>;

/// The weight of an expert in one of the slots of a stack, which has `dims` dimensions. A single value, such as a step count, belongs to all experts.
/// `None` if the tensor is neither that nor a stack.
pub(super) fn part_of(
    stack: &Tensor,
    path: Vec<Key>,
    expert: u64,
    (slot, slots): (usize, usize),
    dims: usize,
) -> Option<Tensor> {
    // Biases are one row each.
    let (rows, columns) = match stack.shape[..] {
        [_, rows, columns] if dims == 3 => (rows, columns),
        [_, columns] if dims == 2 => (1, columns),
        _ => return (stack.len() == 1).then(|| Tensor { path, ..stack.clone() }),
    };
    let rows = rows / slots as u64;
    let (first, shape) = (slot as u64 * rows, [rows, columns][3 - stack.shape.len()..].to_vec());
    let start = (expert * slots as u64 + slot as u64) * rows * columns;
    let size = stack.dtype.size_bytes() as u64;
    let cut = |chunk: &Chunk| {
        let (region, skipped) = match &chunk.region {
            Region::Flat(range) => {
                let held = range.start.max(start)..range.end.min(start + rows * columns);
                let region =
                    (held.start < held.end).then(|| Region::Flat(held.start - start..held.end - start));
                (region?, held.start - range.start)
            }
            Region::Box { offsets, sizes, strides } if shape.len() == 1 => {
                let is_held = (offsets[0]..offsets[0] + sizes[0]).contains(&expert);
                let region = is_held.then(|| Region::Box {
                    offsets: offsets[1..].to_vec(),
                    sizes: sizes[1..].to_vec(),
                    strides: strides[1..].to_vec(),
                });
                (region?, (expert - offsets[0]) * strides[0])
            }
            Region::Box { offsets, sizes, strides } => {
                let held = offsets[1].max(first)..(offsets[1] + sizes[1]).min(first + rows);
                let is_held = (offsets[0]..offsets[0] + sizes[0]).contains(&expert) && held.start < held.end;
                let region = is_held.then(|| Region::Box {
                    offsets: vec![held.start - first, offsets[2]],
                    sizes: vec![held.end - held.start, sizes[2]],
                    strides: strides[1..].to_vec(),
                });
                (region?, (expert - offsets[0]) * strides[0] + (held.start - offsets[1]) * strides[1])
            }
        };
        let offset = chunk.offset + skipped * size;
        Some(Chunk { region: region.simplified(&shape), source: chunk.source, offset })
    };
    let chunks = stack.chunks.iter().filter_map(cut).collect();
    Some(Tensor { path, role: stack.role, dtype: stack.dtype, shape, chunks })
}

/// Stacks the weights of all experts. Of single values, such as step counts, the first one stands for all.
///
/// # Errors
/// The reason, if weights are missing, differ in shape or dtype, or are neither matrices nor single values.
pub(super) fn stack_of(path: Vec<Key>, weights: Weights, experts: u64) -> Result<Tensor, String> {
    let (slots, first) =
        weights.first_key_value().map(|(_, weight)| weight.clone()).expect("stacks have weights");
    let name = join(&path);
    let is_bias = first.shape.len() == 1 && slots == 1 && name.ends_with("_bias");
    if first.shape.len() != 2 && first.len() != 1 && !is_bias {
        return Err(format!(
            "experts have `{name}` of shape {:?}: a state that is neither one value nor of the shape of a weight, as \
             Adafactor's are, cannot be stacked; `--only model` stacks the weights alone",
            first.shape
        ));
    }
    let mut chunks = Vec::new();
    for place in (0..experts).flat_map(|expert| (0..slots).map(move |slot| (expert, slot))) {
        let (expert, slot) = place;
        let Some((_, weight)) = weights.get(&place) else {
            let why =
                if first.role == Role::Model { "" } else { "; `--only model` stacks the weights alone" };
            return Err(format!(
                "expert {expert} lacks its part of `{name}`: experts cannot be stacked{why}"
            ));
        };
        if (weight.dtype, &weight.shape) != (first.dtype, &first.shape) {
            return Err(format!(
                "the experts of `{name}` differ in shape or dtype, so they cannot be stacked"
            ));
        }
        if is_bias {
            chunks
                .extend(weight.chunks.iter().map(|chunk| placed_bias(chunk, [experts, first.len()], expert)));
            continue;
        }
        let [rows, columns] = first.shape[..] else { continue };
        let shape = [experts, rows * slots as u64, columns];
        chunks.extend(
            weight.chunks.iter().map(|chunk| placed(chunk, &shape, expert, slot as u64 * rows, rows)),
        );
    }
    let shape = match first.shape[..] {
        [columns] if is_bias => vec![experts, columns],
        [rows, columns] => vec![experts, rows * slots as u64, columns],
        _ => return Ok(Tensor { path, ..first }),
    };
    Ok(Tensor { path, role: first.role, dtype: first.dtype, shape, chunks })
}

/// A chunk of a bias, as a chunk of its stack.
fn placed_bias(chunk: &Chunk, shape: [u64; 2], expert: u64) -> Chunk {
    let region = match &chunk.region {
        Region::Flat(range) => Region::Flat(expert * shape[1] + range.start..expert * shape[1] + range.end),
        Region::Box { offsets, sizes, strides } => Region::Box {
            offsets: vec![expert, offsets[0]],
            sizes: vec![1, sizes[0]],
            strides: vec![sizes[0] * strides[0], strides[0]],
        },
    };
    Chunk { region: region.simplified(&shape), ..chunk.clone() }
}

/// A chunk of a weight, as a chunk of the stack in which the weight begins at row `first` of its expert.
fn placed(chunk: &Chunk, shape: &[u64; 3], expert: u64, first: u64, rows: u64) -> Chunk {
    let region = match &chunk.region {
        Region::Flat(range) => {
            let start = (expert * shape[1] + first) * shape[2];
            Region::Flat(start + range.start..start + range.end)
        }
        Region::Box { offsets, sizes, strides } => Region::Box {
            offsets: vec![expert, first + offsets[0], offsets[1]],
            sizes: vec![1, sizes[0], sizes[1]],
            strides: vec![rows * strides[0], strides[0], strides[1]],
        },
    };
    Chunk { region: region.simplified(shape), ..chunk.clone() }
}
