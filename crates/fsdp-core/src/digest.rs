//! Digests of values that must be the same on all ranks.
//!
//! A digest is the 128-bit FNV-1a hash of the `Debug` text of values. This covers every field of a type without listing
//! them, so none can be forgotten, and gives the same result wherever the same program runs. It detects accidents, not
//! forgeries: ranks that were started differently have different digests, with all but certainty.

use std::fmt::{self, Debug, Write};

const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;

/// A 128-bit digest of one or more values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(u128);

impl Digest {
    /// Returns the digest of a value.
    pub fn of(value: &impl Debug) -> Self {
        Self(OFFSET).and(value)
    }

    /// Extends the digest by another value.
    #[must_use]
    pub fn and(mut self, value: &impl Debug) -> Self {
        // `write_str` below never fails; if a `Debug` implementation does, the text written so far counts.
        let _ = write!(self, "{value:?}");
        self
    }

    /// The digest as two integers (high word first), to send in a collective.
    pub fn words(self) -> [i64; 2] {
        [(self.0 >> 64) as i64, self.0 as i64]
    }
}

impl Write for Digest {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(PRIME);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> u128 {
        let mut digest = Digest(OFFSET);
        digest.write_str(text).unwrap();
        digest.0
    }

    #[test]
    fn digest_is_128_bit_fnv_1a() {
        assert_eq!(text(""), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_eq!(text("a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
        assert_eq!(text("foobar"), 0x343e_1662_793c_64bf_6f0d_3597_ba44_6f18);
    }

    #[test]
    fn digest_covers_every_value_and_words_hold_all_bits() {
        let digest = Digest::of(&(1, "two"));
        assert_eq!(digest, Digest::of(&(1, "two")));
        assert_ne!(digest, Digest::of(&(1, "too")));
        assert_ne!(digest, digest.and(&0));
        let [high, low] = digest.words();
        assert_eq!((high as u64 as u128) << 64 | low as u64 as u128, digest.0);
    }
}
