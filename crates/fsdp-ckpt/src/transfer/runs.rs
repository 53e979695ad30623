//! Digests of a range whose parts arrive in any order: adjacent parts are combined at once.
//!
//! Workers take parts nearly in order, so there are few open runs, whatever the length of the range.

use std::{collections::BTreeMap, ops::Range};

use crate::digest::{Digest, DigestKind};

/// The digests of the parts seen so far.
#[derive(Debug)]
pub(super) struct Runs {
    kind: DigestKind,
    /// By first byte: length and digest.
    runs: BTreeMap<u64, (u64, Digest)>,
    /// Whether a part overlapped a run without being contained in it, so that no digest can be combined.
    is_spoiled: bool,
}

impl Runs {
    pub(super) fn new(kind: DigestKind) -> Runs {
        Runs { kind, runs: BTreeMap::new(), is_spoiled: false }
    }

    pub(super) fn kind(&self) -> DigestKind {
        self.kind
    }

    /// Adds a part. A part that is contained in a run seen before changes nothing.
    pub(super) fn add(&mut self, offset: u64, len: u64, digest: Digest) {
        if len == 0 || self.is_spoiled {
            return;
        }
        let (mut offset, mut len, mut digest) = (offset, len, digest);
        if let Some((&before, &(before_len, before_digest))) = self.runs.range(..=offset).next_back() {
            let before_end = before + before_len;
            if offset + len <= before_end {
                return;
            }
            if offset < before_end {
                return self.spoil();
            }
            if offset == before_end {
                digest = before_digest.then(digest, len);
                (offset, len) = (before, before_len + len);
            }
        }
        if let Some((&after, &(after_len, after_digest))) = self.runs.range(offset + 1..).next() {
            if after < offset + len {
                return self.spoil();
            }
            if after == offset + len {
                self.runs.remove(&after);
                digest = digest.then(after_digest, after_len);
                len += after_len;
            }
        }
        self.runs.insert(offset, (len, digest));
    }

    /// Returns the digest of the first `len` bytes. `None` unless exactly these have been added.
    pub(super) fn whole(&self, len: u64) -> Option<Digest> {
        if len == 0 {
            return Some(self.kind.empty());
        }
        self.runs.get(&0).filter(|(seen, _)| *seen == len && !self.is_spoiled).map(|(_, digest)| *digest)
    }

    /// Returns the parts of the first `len` bytes that must still be added before [`Runs::whole`] returns a digest:
    /// empty if nothing was added, or everything. After such an overlap it starts over.
    pub(super) fn rest(&mut self, len: u64) -> Vec<Range<u64>> {
        if self.runs.is_empty() && !self.is_spoiled {
            return Vec::new();
        }
        self.is_spoiled = false;
        let mut end = 0;
        let ends = self.runs.iter().map(|(&start, (len, _))| (start, start + len)).chain([(len, len)]);
        let gaps = ends.map(|(start, next)| std::mem::replace(&mut end, next)..start);
        gaps.filter(|gap| !gap.is_empty()).collect()
    }

    fn spoil(&mut self) {
        self.is_spoiled = true;
        self.runs.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_in_any_order_combine_to_full_digest(
            bytes in proptest::collection::vec(any::<u8>(), 1..300),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..12),
            order in any::<u64>(),
        ) {
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            cuts.dedup();
            let mut parts: Vec<(usize, usize)> = cuts.windows(2).map(|cut| (cut[0], cut[1])).collect();
            parts.sort_by_key(|&(start, _)| (start as u64).wrapping_mul(order | 1));
            let mut runs = Runs::new(DigestKind::Crc64);
            for &(start, end) in &parts {
                prop_assert_eq!(runs.whole(bytes.len() as u64), None);
                runs.add(start as u64, (end - start) as u64, DigestKind::Crc64.of(&bytes[start..end]));
            }
            prop_assert_eq!(runs.whole(bytes.len() as u64), Some(DigestKind::Crc64.of(&bytes)));
        }
    }

    #[test]
    fn repeated_part_is_ignored_but_partial_overlap_invalidates() {
        let of = |bytes: &[u8]| DigestKind::Crc32.of(bytes);
        let mut runs = Runs::new(DigestKind::Crc32);
        runs.add(0, 4, of(b"abcd"));
        runs.add(1, 2, of(b"bc"));
        assert_eq!(runs.whole(4), Some(of(b"abcd")));
        runs.add(3, 2, of(b"de"));
        assert_eq!(runs.whole(5), None);
        assert_eq!(runs.whole(4), None);
    }
}
