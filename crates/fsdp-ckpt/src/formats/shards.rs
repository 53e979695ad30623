//! Consecutive shards, one per rank, and where the elements of a range of their sequence are stored.
//!
//! PyTorch/XLA and DeepSpeed cut a flattened parameter (or several in a row) into one run of elements per rank, padded
//! at the end. Merging the ranks reduces to looking up ranges of that sequence.

use std::ops::Range;

use crate::checkpoint::{Chunk, Region};

/// The run of elements that one rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shard {
    /// Index of its source.
    pub(crate) source: usize,
    /// Byte offset of the first element in the source.
    pub(crate) offset: u64,
    /// Number of elements, including padding.
    pub(crate) len: u64,
}

/// The chunks of a tensor that is `range` of the sequence of `shards`, in shard order.
///
/// # Panics
/// If the shards end before the range does.
pub(crate) fn chunks_of(shards: &[Shard], range: Range<u64>, element_bytes: u64) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    let mut start = 0;
    for shard in shards {
        let held = range.start.max(start)..range.end.min(start + shard.len);
        if !held.is_empty() {
            let region = Region::Flat(held.start - range.start..held.end - range.start);
            let offset = shard.offset + (held.start - start) * element_bytes;
            chunks.push(Chunk { region, source: shard.source, offset });
        }
        start += shard.len;
    }
    assert!(range.end <= start, "shards are as long as what they hold: {} of {start}", range.end);
    chunks
}

/// Total number of elements of all shards; `None` if it does not fit 64 bits.
pub(crate) fn len_of(shards: &[Shard]) -> Option<u64> {
    shards.iter().try_fold(0u64, |len, shard| len.checked_add(shard.len))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn chunks_locate_every_element_of_range(
            lens in prop::collection::vec(0u64..6, 1..6),
            ends in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
        ) {
            let shards: Vec<Shard> = lens
                .iter()
                .enumerate()
                .map(|(source, len)| Shard { source, offset: 100 * source as u64, len: *len })
                .collect();
            let len = len_of(&shards).unwrap();
            let (one, two) = (ends.0.index(len as usize + 1) as u64, ends.1.index(len as usize + 1) as u64);
            let range = one.min(two)..one.max(two);
            // The place of each element of the sequence, one by one.
            let places: Vec<(usize, u64)> = shards
                .iter()
                .flat_map(|shard| (0..shard.len).map(|i| (shard.source, shard.offset + 4 * i)))
                .collect();
            let mut seen = 0;
            for chunk in chunks_of(&shards, range.clone(), 4) {
                let Region::Flat(elements) = chunk.region else { panic!("shards are flat") };
                prop_assert_eq!(elements.start, seen);
                for (i, element) in elements.enumerate() {
                    let place = places[(range.start + element) as usize];
                    prop_assert_eq!(place, (chunk.source, chunk.offset + 4 * i as u64));
                    seen += 1;
                }
            }
            prop_assert_eq!(seen, range.end - range.start);
        }
    }
}
