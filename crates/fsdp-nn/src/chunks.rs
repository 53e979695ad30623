//! How many rows of logits the output head makes at once.
//!
//! A chunk's logits take room and are read several times; every chunk reads the whole weight twice, and reads and
//! writes the whole gradient of the weight. So chunks are small where caches hold them and memory is the smaller concern
//! of a product, and large where products are so fast that the traffic of a small chunk takes longer than they do.

use fsdp_core::DType;

/// Which chunks a backend wants. Sums over rows are cut where chunks end, so this decides bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HeadChunks {
    /// For processors: a few megabytes of logits.
    #[default]
    Small,
    /// For devices: up to two gigabytes of logits.
    Large,
}

/// Logits of a small chunk, as long as it keeps at least [`SMALL_ROWS_MIN`] rows.
const SMALL_LOGITS: usize = 1 << 20;
/// With fewer rows, reading and writing the gradient of the weight costs more than the product itself on a processor.
const SMALL_ROWS_MIN: usize = 128;

/// Logits of a large chunk. The traffic of the weight's gradient (8 bytes for each of its elements and chunk) against the
/// three products (6 operations for each of its elements and row): 4096 rows keep the first near a twentieth of the
/// second where a device does 150 operations in the time of a byte. With a vocabulary of 128 Ki that is this many.
const LARGE_LOGITS: usize = 1 << 29;
/// Large chunks are multiples of this many rows: whole tiles of the products.
const LARGE_ROWS: usize = 256;

impl HeadChunks {
    /// Whether the gradient of a chunk's logits, made in the master dtype, takes room of its own in `dtype` too: where it
    /// is read by large products, and those take operands of one dtype.
    pub fn round(self, dtype: DType) -> bool {
        self == HeadChunks::Large && dtype != dtype.master()
    }

    /// Rows of a chunk, for a head of `vocab` classes over `rows` rows.
    pub fn rows(self, rows: usize, vocab: usize) -> usize {
        match self {
            HeadChunks::Small => rows.min(SMALL_ROWS_MIN.max(SMALL_LOGITS / vocab)),
            HeadChunks::Large => {
                let most = (LARGE_LOGITS / vocab).max(LARGE_ROWS) / LARGE_ROWS * LARGE_ROWS;
                let chunks = rows.div_ceil(most).max(1);
                rows.min(rows.div_ceil(chunks).next_multiple_of(LARGE_ROWS))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_chunks_are_as_many_rows_as_a_cache_holds() {
        let rows = |rows, vocab| HeadChunks::Small.rows(rows, vocab);
        assert_eq!([rows(4096, 512), rows(4096, 50304), rows(64, 50304), rows(0, 7)], [2048, 128, 64, 0]);
    }

    #[test]
    fn large_chunks_are_few_and_of_one_size() {
        let rows = |rows, vocab| HeadChunks::Large.rows(rows, vocab);
        // GPT-2 and Llama as they are benchmarked: 7 and 4 chunks.
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
