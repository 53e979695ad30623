//! How samples and experts are cut into chunks, for the ranks of an axis to share.

/// How something is cut into `count` chunks of equally many consecutive parts: samples along their positions (context
/// parallelism), or the experts of mixtures (expert parallelism). Sums over positions, or over the experts of a token, are
/// trees over chunks, so it is the number of chunks that determines bits, and not the ranks that they are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Chunks {
    /// Number of chunks.
    pub count: usize,
    /// The first chunk on this rank.
    pub first: usize,
    /// Number of consecutive chunks on this rank.
    pub here: usize,
}

/// How samples and the experts of mixtures are cut, and which chunks of each are on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cuts {
    /// Chunks of samples.
    pub samples: Chunks,
    /// Chunks of experts.
    pub experts: Chunks,
    /// Whether rows may be sent only to the ranks of their experts, where that moves less than gathering all: the program then
    /// reads routes on the host.
    pub sends_rows: bool,
}

impl Cuts {
    /// Neither samples nor experts are cut.
    pub const WHOLE: Cuts = Cuts { samples: Chunks::WHOLE, experts: Chunks::WHOLE, sends_rows: false };
}

impl Chunks {
    /// A single chunk.
    pub const WHOLE: Chunks = Chunks::all(1);

    /// All of `count` chunks on one rank.
    pub const fn all(count: usize) -> Self {
        Self { count, first: 0, here: count }
    }

    /// Number of ranks that have the chunks together.
    pub const fn ranks(&self) -> usize {
        self.count / self.here
    }

    /// By chunk on this rank and sample: of the first `lengths` rows of each sample, those in the chunk, of `rows` rows.
    pub(crate) fn lengths(&self, lengths: &[usize], rows: usize) -> Vec<usize> {
        let here = self.first..self.first + self.here;
        let of_chunk = |chunk: usize| move |length: &usize| length.saturating_sub(chunk * rows).min(rows);
        here.flat_map(|chunk| lengths.iter().map(of_chunk(chunk))).collect()
    }

    /// Of so many rows of whole samples, those on this rank; and whether their positions are uploaded, as they are for
    /// samples with several documents (`packed`).
    pub(crate) fn rows(&self, all: usize, packed: bool) -> (usize, bool) {
        (all / self.count * self.here, packed || self.count > 1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn lengths_of_chunks_count_the_rows_that_whole_samples_count(
            lengths in prop::collection::vec(0usize..=12, 1..4), first in 0usize..4, here in 1usize..4,
        ) {
            let (rows, chunks) = (3, Chunks { count: 4, first, here: here.min(4 - first) });
            let counted = |chunk: usize, length: usize| (chunk * rows..(chunk + 1) * rows).filter(move |&row| row < length);
            let expected: Vec<usize> = (first..first + chunks.here)
                .flat_map(|chunk| lengths.iter().map(move |&length| counted(chunk, length).count()))
                .collect();
            prop_assert_eq!(chunks.lengths(&lengths, rows), expected);
        }
    }
}
