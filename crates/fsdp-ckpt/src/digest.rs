//! Checksums of byte ranges: CRC-32 as used in zip archives, CRC-32C in trees of OCDBT, CRC-64/NVME in native checkpoints.
//!
//! All can be combined: the digest of a range can be computed from the digests of its parts, so that several threads
//! can read and write parts in any order.

use std::fmt;

use crc_fast::CrcAlgorithm;
use serde::{Deserialize, Serialize};

/// The kind of a checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DigestKind {
    /// CRC-32/ISO-HDLC, the checksum of zip.
    Crc32,
    /// CRC-32C, also known as CRC-32/iSCSI.
    Crc32c,
    /// CRC-64/NVME.
    Crc64,
}

impl DigestKind {
    fn algorithm(self) -> CrcAlgorithm {
        match self {
            DigestKind::Crc32 => CrcAlgorithm::Crc32IsoHdlc,
            DigestKind::Crc32c => CrcAlgorithm::Crc32Iscsi,
            DigestKind::Crc64 => CrcAlgorithm::Crc64Nvme,
        }
    }

    /// Returns the digest of `bytes`.
    pub fn of(self, bytes: &[u8]) -> Digest {
        Digest { kind: self, value: crc_fast::checksum(self.algorithm(), bytes) }
    }

    /// Returns the digest of an empty range.
    pub fn empty(self) -> Digest {
        self.of(&[])
    }
}

/// The checksum of a byte range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Digest {
    /// The kind of the checksum.
    pub kind: DigestKind,
    /// The value; one of 32 bits uses the lower half.
    pub value: u64,
}

impl Digest {
    /// Returns the digest of this range followed by another range of `next_len` bytes.
    ///
    /// # Panics
    /// If the kinds differ.
    pub fn then(self, next: Digest, next_len: u64) -> Digest {
        assert_eq!(self.kind, next.kind, "digests of one kind combine");
        let value = crc_fast::checksum_combine(self.kind.algorithm(), self.value, next.value, next_len);
        Digest { kind: self.kind, value }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            DigestKind::Crc32 => write!(f, "crc32:{:08x}", self.value),
            DigestKind::Crc32c => write!(f, "crc32c:{:08x}", self.value),
            DigestKind::Crc64 => write!(f, "crc64:{:016x}", self.value),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn digests_of_parts_combine_to_digest_of_all(
            bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in any::<prop::sample::Index>(),
        ) {
            let (head, tail) = bytes.split_at(cut.index(bytes.len() + 1));
            for kind in [DigestKind::Crc32, DigestKind::Crc32c, DigestKind::Crc64] {
                let combined = kind.of(head).then(kind.of(tail), tail.len() as u64);
                prop_assert_eq!(combined, kind.of(&bytes));
            }
        }
    }

    #[test]
    fn check_string_digests_match_known_values() {
        assert_eq!(DigestKind::Crc32.of(b"123456789").to_string(), "crc32:cbf43926");
        assert_eq!(DigestKind::Crc32c.of(b"123456789").to_string(), "crc32c:e3069283");
        assert_eq!(DigestKind::Crc64.of(b"123456789").to_string(), "crc64:ae8b14860a799888");
    }
}
