//! Stateless random numbers, as functions of a key and a counter: every rank can compute any element.
//!
//! The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011).
//! It passes BigCrush, and its ten rounds of 32-bit multiplications vectorize. A key is mixed from its parts (seed,
//! name, step, sample, site) with the SplitMix64 finalizer; the counter is the element index.

use crate::host::raw::vectorized;

/// Multipliers and key increments of Philox4x32.
const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: u32 = 10;

/// Number of four-word blocks computed together.
const BATCH: usize = 16;

/// Combines parts into a key; their order matters.
pub fn key(parts: &[u64]) -> u64 {
    parts.iter().fold(0x6673_6470, |key: u64, &part| mix(key.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ mix(part)))
}

/// Hashes a name to a part of a key (FNV-1a, 64 bits).
pub fn name_part(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Returns a number in `0 .. 1`, uniform over multiples of `2^-53`.
pub fn uniform(key: u64, counter: u64) -> f64 {
    let [low, high, ..] = block(key, counter);
    fraction(low, high)
}

/// Returns a number from the standard normal distribution (Box-Muller).
pub fn normal(key: u64, counter: u64) -> f64 {
    let [a, b, c, d] = block(key, counter);
    // 1 - u is in (0, 1], so that the logarithm is finite.
    let radius = (-2.0 * (1.0 - fraction(a, b)).ln()).sqrt();
    radius * (std::f64::consts::TAU * fraction(c, d)).cos()
}

/// Writes the words `start ..` of the stream of `key`: word `i` is word `i % 4` of block `i / 4`.
pub fn words(key: u64, start: u64, words: &mut [u32]) {
    let lead = (start % 4) as usize;
    let mut batch = [0; 4 * BATCH];
    let mut block = start / 4;
    let mut skip = lead;
    let mut written = 0;
    while written < words.len() {
        fill(key, block, &mut batch);
        let count = (batch.len() - skip).min(words.len() - written);
        words[written..written + count].copy_from_slice(&batch[skip..skip + count]);
        written += count;
        block += BATCH as u64;
        skip = 0;
    }
}

vectorized! {
    /// Writes the words of consecutive blocks.
    #[expect(clippy::needless_range_loop, reason = "lanes of four arrays, in lockstep")]
    fn fill(key: u64, first: u64, words: &mut [u32; 4 * BATCH]) {
        let mut x = [[0u32; BATCH]; 4];
        for lane in 0..BATCH {
            let counter = first.wrapping_add(lane as u64);
            x[0][lane] = counter as u32;
            x[1][lane] = (counter >> 32) as u32;
        }
        let mut keys = [key as u32, (key >> 32) as u32];
        for _ in 0..ROUNDS {
            for lane in 0..BATCH {
                let next = round([x[0][lane], x[1][lane], x[2][lane], x[3][lane]], keys);
                for word in 0..4 {
                    x[word][lane] = next[word];
                }
            }
            keys = next_keys(keys);
        }
        for lane in 0..BATCH {
            for word in 0..4 {
                words[4 * lane + word] = x[word][lane];
            }
        }
    }
}

/// Computes one block of the generator.
fn block(key: u64, counter: u64) -> [u32; 4] {
    let mut x = [counter as u32, (counter >> 32) as u32, 0, 0];
    let mut keys = [key as u32, (key >> 32) as u32];
    for _ in 0..ROUNDS {
        x = round(x, keys);
        keys = next_keys(keys);
    }
    x
}

#[inline(always)]
fn round(x: [u32; 4], keys: [u32; 2]) -> [u32; 4] {
    let first = u64::from(MULTIPLIERS[0]) * u64::from(x[0]);
    let second = u64::from(MULTIPLIERS[1]) * u64::from(x[2]);
    [
        (second >> 32) as u32 ^ x[1] ^ keys[0],
        second as u32,
        (first >> 32) as u32 ^ x[3] ^ keys[1],
        first as u32,
    ]
}

#[inline(always)]
fn next_keys(keys: [u32; 2]) -> [u32; 2] {
    [keys[0].wrapping_add(WEYL[0]), keys[1].wrapping_add(WEYL[1])]
}

/// Converts 53 bits to a number in `0 .. 1`.
fn fraction(low: u32, high: u32) -> f64 {
    let bits = (u64::from(high) << 32 | u64::from(low)) >> 11;
    bits as f64 * (1.0 / (1u64 << 53) as f64)
}

/// The finalizer of SplitMix64.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The generator with all four counter words, as the authors' test vectors require.
    fn philox(mut x: [u32; 4], mut keys: [u32; 2]) -> [u32; 4] {
        for _ in 0..ROUNDS {
            x = round(x, keys);
            keys = next_keys(keys);
        }
        x
    }

    #[test]
    fn philox_matches_published_test_vectors() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([!0; 4], [!0; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn words_do_not_depend_on_start_offset() {
        let mut all = vec![0; 300];
        words(7, 0, &mut all);
        for start in [0, 1, 2, 3, 4, 63, 64, 65, 130] {
            for len in [0, 1, 5, 64, 100, 170] {
                let mut some = vec![0; len];
                words(7, start as u64, &mut some);
                assert_eq!(some, all[start..start + len]);
            }
        }
        assert_eq!(all[8..12], block(7, 2));
    }

    #[test]
    fn uniform_and_normal_moments_match_distributions() {
        let count = 100_000;
        let mean = |f: &dyn Fn(u64) -> f64| (0..count).map(f).sum::<f64>() / count as f64;
        assert!((mean(&|i| uniform(3, i)) - 0.5).abs() < 0.005);
        assert!((mean(&|i| uniform(3, i).powi(2)) - 1.0 / 3.0).abs() < 0.005);
        assert!(mean(&|i| normal(3, i)).abs() < 0.02);
        assert!((mean(&|i| normal(3, i).powi(2)) - 1.0).abs() < 0.03);
        assert!((mean(&|i| normal(3, i).powi(4)) - 3.0).abs() < 0.15);
    }

    #[test]
    fn keys_depend_on_every_part_and_their_order() {
        let keys = [key(&[1, 2]), key(&[2, 1]), key(&[1, 2, 0]), key(&[1, 3]), key(&[]), key(&[0])];
        let distinct: std::collections::BTreeSet<u64> = keys.into_iter().collect();
        assert_eq!(distinct.len(), keys.len());
        assert_ne!(name_part("a.b"), name_part("b.a"));
    }
}
