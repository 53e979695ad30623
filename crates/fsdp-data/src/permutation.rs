//! Permutations that are computed rather than stored: position to element in constant time, without memory.
//!
//! A balanced Feistel network permutes the numbers of `2k` bits, whatever its round function. Numbers of at least `len`
//! are encrypted again until they fall below it ("cycle walking"), which yields a permutation of `0..len`. The round
//! function is the finalizer of `SplitMix64` over (key, round, half). So every rank can compute any position of any
//! epoch, and 256 ranks do not store 256 shuffled copies.
//!
//! The permutations are part of the numerics contract: changing a constant changes every run with `shuffle`.

/// Enough for the two halves to mix well; in theory, four rounds suffice only for large domains.
const ROUNDS: u64 = 8;

/// Domains below 2^8 would give the network too few different permutations.
const HALF_BITS_MIN: u32 = 4;

/// The golden ratio in 64 bits, the increment of `SplitMix64`.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A permutation of `0..len`, chosen by a seed and an epoch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Permutation {
    len: u64,
    half_bits: u32,
    keys: [u64; ROUNDS as usize],
}

impl Permutation {
    /// Creates the permutation of an epoch.
    pub(super) fn new(len: usize, seed: u64, epoch: u64) -> Permutation {
        let len = len as u64;
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        let key = mix(mix(seed ^ GOLDEN).wrapping_add(epoch));
        let round_key = |round: usize| mix(key.wrapping_add(GOLDEN.wrapping_mul(round as u64 + 1)));
        Permutation {
            len,
            half_bits: bits.div_ceil(2).max(HALF_BITS_MIN),
            keys: std::array::from_fn(round_key),
        }
    }

    /// Returns the element at a position.
    ///
    /// # Panics
    /// If the position is not below `len`.
    pub(super) fn at(&self, position: usize) -> usize {
        assert!((position as u64) < self.len, "position {position} is below {}", self.len);
        let mut element = self.encrypt(position as u64);
        while element >= self.len {
            element = self.encrypt(element);
        }
        usize::try_from(element).expect("below len, which was a usize")
    }

    fn encrypt(&self, number: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (number >> self.half_bits, number & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

/// The finalizer of `SplitMix64`.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests;
