//! Checks before the first step that all ranks were started with the same settings.

use std::collections::BTreeMap;

use super::{Comm, CommError, Purpose};
use crate::digest::Digest;
use crate::dtype::DType;
use crate::error::Error;
use crate::memory::{Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use crate::rank::{Queue, Rank};

impl<M: Memory> Comm<M> {
    /// Compares a digest with the digests of all other ranks; the communicator must span the whole world.
    ///
    /// # Errors
    /// [`CommError::Differs`], the same on every rank; errors of the communicator and of the memory.
    pub fn agree(&mut self, memory: &M, digest: Digest) -> Result<(), Error> {
        let size = self.size();
        let mut local = memory.allocate(Category::CommStaging, DType::I64, 2)?;
        memory.write(Queue::Gather, HostSlice::I64(&digest.words()), SliceMut::whole(&mut local))?;
        let all = memory.allocate(Category::CommStaging, DType::I64, 2 * size)?;
        let pending = self.all_gather(memory, Purpose::Setup, None, vec![local], vec![all])?;
        let all = pending.wait_on(memory, Queue::Gather)?.outputs.pop().expect("one buffer came back");
        let mut words = vec![0; 2 * size];
        memory.read(Queue::Gather, Slice::whole(&all), HostSliceMut::I64(&mut words))?;
        self.check()?;
        match differing(words.as_chunks().0) {
            Some((ranks, reference)) => Err(CommError::Differs { ranks, reference }.into()),
            None => Ok(()),
        }
    }
}

/// Returns the ranks whose words differ from the most frequent value (if tied, the one that occurs first), and the
/// first rank that has that value. `None` if all are equal.
fn differing(digests: &[[i64; 2]]) -> Option<(Vec<Rank>, Rank)> {
    let mut counts: BTreeMap<&[i64; 2], usize> = BTreeMap::new();
    digests.iter().for_each(|digest| *counts.entry(digest).or_default() += 1);
    // `max_by_key` returns the last of equal maxima; reversed, that is the first rank.
    let (reference, majority) = digests.iter().enumerate().rev().max_by_key(|(_, digest)| counts[digest])?;
    let ranks: Vec<Rank> = digests
        .iter()
        .enumerate()
        .filter(|&(_, digest)| digest != majority)
        .map(|(rank, _)| Rank(rank))
        .collect();
    (!ranks.is_empty()).then_some((ranks, Rank(reference)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(words: &[i64]) -> Option<(Vec<usize>, usize)> {
        let words: Vec<[i64; 2]> = words.iter().map(|&word| [7, word]).collect();
        differing(&words).map(|(ranks, reference)| (ranks.iter().map(|rank| rank.0).collect(), reference.0))
    }

    #[test]
    fn ranks_differing_from_majority_are_found() {
        assert_eq!(found(&[5]), None);
        assert_eq!(found(&[5, 5, 5]), None);
        assert_eq!(found(&[5, 6]), Some((vec![1], 0)));
        assert_eq!(found(&[6, 5, 5, 5]), Some((vec![0], 1)));
        assert_eq!(found(&[5, 5, 6, 6]), Some((vec![2, 3], 0)));
        assert_eq!(found(&[1, 2, 3, 3]), Some((vec![0, 1], 2)));
        assert_eq!(found(&[i64::MIN, i64::MIN]), None);
    }

    #[test]
    fn both_words_are_compared() {
        assert!(differing(&[[0, 1], [0, 2]]).is_some());
        assert!(differing(&[[1, 0], [2, 0]]).is_some());
    }
}
