//! How many rows of logits the output head computes at once.
//!
//! The logits of a chunk take memory and are read several times; every chunk reads the whole weight twice, and reads
//! and writes the weight's whole gradient. Chunks are therefore small on CPUs, where caches hold them and memory
//! traffic is the smaller cost of a product, and large on devices, where the products are so fast that the traffic of
//! a small chunk would take longer.

use fsdp_core::DType;

/// The chunk size that a backend uses. Sums over rows are split at chunk boundaries, so the choice affects result
/// bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HeadChunks {
    /// For CPUs: a few megabytes of logits.
    #[default]
    Small,
    /// For accelerators: up to two gigabytes of logits.
    Large,
}

/// Number of logits in a small chunk, unless that gives fewer than [`SMALL_ROWS_MIN`] rows.
const SMALL_LOGITS: usize = 1 << 20;
/// With fewer rows, a CPU spends more time reading and writing the weight's gradient than on the product itself.
const SMALL_ROWS_MIN: usize = 128;

/// Number of logits in a large chunk. The weight gradient's traffic is 8 bytes per element and chunk; the three
/// products take 6 operations per element and row. On a device that does 150 operations in the time of a byte, 4096
/// rows keep the traffic near a twentieth of the products. With a vocabulary of 128 Ki that is this many logits.
const LARGE_LOGITS: usize = 1 << 29;
/// Row multiple of large chunks, so that products use whole tiles.
const LARGE_ROWS: usize = 256;

impl HeadChunks {
    /// Whether the gradient of a chunk's logits, computed in the master dtype, is also stored in `dtype`: large
    /// products read it, and take operands of one dtype.
    pub fn round(self, dtype: DType) -> bool {
        self == HeadChunks::Large && dtype != dtype.master()
    }

    /// Rows of a chunk, for a head over `rows` rows and `vocab` classes.
    pub fn rows(self, rows: usize, vocab: usize) -> usize {
        match self {
            HeadChunks::Small => rows.min(SMALL_ROWS_MIN.max(SMALL_LOGITS / vocab)),
            HeadChunks::Large => {
                let max_rows = (LARGE_LOGITS / vocab).max(LARGE_ROWS) / LARGE_ROWS * LARGE_ROWS;
                let chunks = rows.div_ceil(max_rows).max(1);
                rows.min(rows.div_ceil(chunks).next_multiple_of(LARGE_ROWS))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_chunk_rows_stay_within_cache_limit() {
        let rows = |rows, vocab| HeadChunks::Small.rows(rows, vocab);
        assert_eq!([rows(4096, 512), rows(4096, 50304), rows(64, 50304), rows(0, 7)], [2048, 128, 64, 0]);
    }

    #[test]
    fn large_chunks_are_bounded_and_none_is_empty() {
        let rows = |rows, vocab| HeadChunks::Large.rows(rows, vocab);
        // GPT-2 and Llama at their benchmark sizes: 7 and 4 chunks.
        assert_eq!(rows(64 * 1024, 50304), 9472);
        assert_eq!(rows(8 * 2048, 128_256), 4096);
        assert_eq!([rows(100, 50304), rows(0, 7), rows(1000, 1 << 30)], [100, 0, 256]);
        for (all, vocab) in [(65536, 50304), (16384, 128_256), (5000, 1_000_000), (4097, 131_072)] {
            let chunk = rows(all, vocab);
            assert!(chunk * vocab <= LARGE_LOGITS.max(LARGE_ROWS * vocab), "{all} x {vocab}: {chunk}");
            assert!(all.div_ceil(chunk) * chunk - all < chunk, "no chunk is empty");
        }
    }
}
