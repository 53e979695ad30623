//! Packing "packed": determines which documents a sample contains.
//!
//! A document takes as many positions as it has targets, at most `seq_len`. Documents are assigned from the longest to
//! the shortest, each to the sample with the least room that is still sufficient (best fit decreasing: Johnson 1973;
//! the packing of Ding et al. 2024, and of TRL). The result depends only on the lengths. Samples are then ordered by
//! their first documents, and the documents of each sample as in the data.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;

/// Documents grouped by sample.
#[derive(Debug)]
pub(super) struct Packed {
    /// The documents of all samples, one sample after the other.
    documents: Vec<usize>,
    /// Where the documents of each sample start, followed by the end.
    starts: Vec<usize>,
}

impl Packed {
    /// Packs documents with these numbers of positions, each at most `seq_len`.
    pub(super) fn new(lens: Vec<usize>, seq_len: usize) -> Packed {
        let samples = number(best_fit(&lens, seq_len));
        let count = samples.iter().max().map_or(0, |last| last + 1);
        let mut starts = vec![0; count + 1];
        samples.iter().for_each(|&sample| starts[sample + 1] += 1);
        for sample in 0..count {
            starts[sample + 1] += starts[sample];
        }
        let mut next = starts.clone();
        let mut documents = vec![0; samples.len()];
        for (document, sample) in samples.into_iter().enumerate() {
            documents[next[sample]] = document;
            next[sample] += 1;
        }
        Packed { documents, starts }
    }

    /// Number of samples.
    pub(super) fn len(&self) -> usize {
        self.starts.len() - 1
    }

    /// Returns the documents of a sample, in order.
    pub(super) fn sample(&self, index: usize) -> impl Iterator<Item = usize> {
        let Range { start, end } = self.starts[index]..self.starts[index + 1];
        self.documents[start..end].iter().copied()
    }
}

/// Returns the sample of each document.
fn best_fit(lens: &[usize], seq_len: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..lens.len()).collect();
    order.sort_by_key(|&document| (Reverse(lens[document]), document));
    let mut with_room: BTreeSet<(usize, usize)> = BTreeSet::new();
    let (mut samples, mut count) = (vec![0; lens.len()], 0);
    for document in order {
        let len = lens[document];
        let fitting = with_room.range((len, 0)..).next().copied();
        let (room, sample) = fitting.unwrap_or((seq_len, count));
        match fitting {
            Some(found) => _ = with_room.remove(&found),
            None => count += 1,
        }
        samples[document] = sample;
        if room > len {
            with_room.insert((room - len, sample));
        }
    }
    samples
}

/// Renumbers samples in the order in which they first appear.
fn number(mut samples: Vec<usize>) -> Vec<usize> {
    let mut numbers = vec![None; samples.len()];
    let mut next = 0;
    for sample in &mut samples {
        let number = numbers[*sample].get_or_insert_with(|| {
            next += 1;
            next - 1
        });
        *sample = *number;
    }
    samples
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn packed(lens: &[usize], seq_len: usize) -> Vec<Vec<usize>> {
        let packed = Packed::new(lens.to_vec(), seq_len);
        (0..packed.len()).map(|sample| packed.sample(sample).collect()).collect()
    }

    #[test]
    fn packing_is_best_fit_decreasing() {
        assert_eq!(packed(&[], 4), Vec::<Vec<usize>>::new());
        // 7, 6 and 5 have samples of their own; 4 goes to 6, and 3 to 7.
        assert_eq!(packed(&[3, 6, 5, 7, 4], 10), [vec![0, 3], vec![1, 4], vec![2]]);
        // 3 fits after 5 and after 6, which leaves less room.
        assert_eq!(packed(&[5, 3, 6], 10), [vec![0], vec![1, 2]]);
    }

    proptest! {
        #[test]
        fn samples_hold_every_document_once_and_cannot_be_merged(
            seq_len in 1_usize..40,
            raw in prop::collection::vec(0_usize..1000, 0..60),
        ) {
            let lens: Vec<usize> = raw.into_iter().map(|raw| 1 + raw % seq_len).collect();
            let samples = packed(&lens, seq_len);
            let mut seen: Vec<usize> = samples.concat();
            seen.sort_unstable();
            prop_assert!(seen.into_iter().eq(0..lens.len()));
            let sums: Vec<usize> = samples.iter().map(|of| of.iter().map(|&document| lens[document]).sum()).collect();
            prop_assert!(sums.iter().all(|&sum| sum <= seq_len));
            for (index, sum) in sums.iter().enumerate() {
                prop_assert!(sums[..index].iter().all(|other| other + sum > seq_len));
            }
            prop_assert!(samples.iter().all(|of| of.is_sorted()) && samples.is_sorted_by_key(|of| of[0]));
        }
    }
}
