//! Encoding of rows; NF4 with the arithmetic of bitsandbytes on a CPU.

use super::{CodeBook, Format, Packed, mxfp4};

/// Elements with a common scale.
pub const BLOCK: usize = 64;

/// Scales with a common scale.
pub const NESTED_BLOCK: usize = 256;

/// The 16 numbers: of equal weight under a normal distribution, scaled to magnitudes up to 1.
#[expect(clippy::excessive_precision, reason = "as they are published")]
pub const VALUES: [f32; 16] = [
    -1.0,
    -0.696_192_800_998_687_7,
    -0.525_073_051_452_636_7,
    -0.394_917_488_098_144_53,
    -0.284_441_381_692_886_35,
    -0.184_773_430_228_233_34,
    -0.091_050_036_251_544_95,
    0.0,
    0.079_580_299_556_255_34,
    0.160_930_201_411_247_25,
    0.246_112_301_945_686_34,
    0.337_915_241_718_292_24,
    0.440_709_829_330_444_34,
    0.562_617_003_917_694_1,
    0.722_956_836_223_602_3,
    1.0,
];

/// The scales of a whole matrix, in the order of its blocks.
#[derive(Clone, Debug, PartialEq)]
pub enum Scales {
    /// As they are.
    Single(Vec<f32>),
    /// In 8 bits.
    Nested(Nested),
    /// As exponents of two, with a bias of 127.
    Exponents(Vec<u8>),
}

/// Scales in 8 bits, in blocks of [`NESTED_BLOCK`].
#[derive(Clone, Debug, PartialEq)]
pub struct Nested {
    /// The code of each scale, after `offset` was subtracted from it.
    pub codes: Vec<u8>,
    /// The scale of each block of scales.
    pub scales: Vec<f32>,
    /// The mean of all scales.
    pub offset: f32,
}

impl Scales {
    /// Computes the scales of a matrix from the largest magnitude of each of its blocks.
    pub fn new(format: Format, magnitudes: Vec<f32>) -> Self {
        match format {
            Format::Nf4Single => Scales::Single(magnitudes),
            Format::Nf4 => {
                let sum: f64 = magnitudes.iter().copied().map(f64::from).sum();
                let offset = (sum / magnitudes.len().max(1) as f64) as f32;
                let (mut codes, mut scales) = (Vec::with_capacity(magnitudes.len()), Vec::new());
                for block in magnitudes.chunks(NESTED_BLOCK) {
                    let scale = largest(block.iter().map(|scale| scale - offset));
                    let code = |scale_of: &f32| CodeBook::signed().code(scaled(scale_of - offset, scale));
                    codes.extend(block.iter().map(code));
                    scales.push(scale);
                }
                Scales::Nested(Nested { codes, scales, offset })
            }
            Format::Mxfp4 => Scales::Exponents(magnitudes.into_iter().map(mxfp4::exponent).collect()),
        }
    }

    /// Appends the part of a row's bytes that is for its scales.
    fn write(&self, matrix: Packed, row: usize, bytes: &mut Vec<u8>) {
        let blocks = row * matrix.blocks()..(row + 1) * matrix.blocks();
        match self {
            Scales::Single(scales) => {
                scales[blocks].iter().for_each(|scale| bytes.extend(scale.to_le_bytes()));
            }
            Scales::Nested(Nested { codes, scales, offset }) => {
                bytes.extend(&codes[blocks.clone()]);
                let first = blocks.start / NESTED_BLOCK;
                // A row that starts with a block of scales may have a part of one less than others.
                let own =
                    (first..first + matrix.nested_max()).map(|at| scales.get(at).copied().unwrap_or(0.0));
                own.chain([*offset]).for_each(|scale| bytes.extend(scale.to_le_bytes()));
            }
            Scales::Exponents(exponents) => bytes.extend(&exponents[blocks]),
        }
    }
}

/// The largest magnitude; NaN if there is one.
pub(super) fn largest(values: impl Iterator<Item = f32>) -> f32 {
    values.fold(
        0.0,
        |largest: f32, value| if value.abs() <= largest || largest.is_nan() { largest } else { value.abs() },
    )
}

/// A value as a fraction of a scale.
fn scaled(value: f32, scale: f32) -> f32 {
    (value * (1.0 / scale.max(1e-38))).clamp(-1.0, 1.0)
}

impl Packed {
    /// The most blocks of scales that a row has a part of.
    pub(super) fn nested_max(&self) -> usize {
        match self.blocks() % NESTED_BLOCK {
            0 => self.blocks() / NESTED_BLOCK,
            _ => (self.blocks() - 1).div_ceil(NESTED_BLOCK) + 1,
        }
    }

    /// Appends the bytes of a row with these elements.
    pub fn encode(&self, scales: &Scales, row: usize, values: &[f32], bytes: &mut Vec<u8>) {
        let [first, second] = self.format.shifts();
        for block in values.chunks(self.format.block()) {
            let largest = largest(block.iter().copied());
            let code = |value: f32| match self.format {
                Format::Nf4 | Format::Nf4Single => nearest(scaled(value, largest)),
                Format::Mxfp4 => mxfp4::nearest(value / mxfp4::power(mxfp4::exponent(largest))),
            };
            bytes.extend(block.chunks(2).map(|pair| code(pair[0]) << first | code(pair[1]) << second));
        }
        scales.write(*self, row, bytes);
    }

    /// Appends the bytes of a row with these codes, two per byte.
    pub fn join(&self, scales: &Scales, row: usize, codes: &[u8], bytes: &mut Vec<u8>) {
        bytes.extend(codes);
        scales.write(*self, row, bytes);
    }
}

/// The code of the nearest of the 16 numbers; of two equally near ones, the lower.
fn nearest(value: f32) -> u8 {
    let is_above = |pair: &[f32]| value > (pair[0] + pair[1]) / 2.0;
    VALUES.windows(2).map(|pair| u8::from(is_above(pair))).sum()
}
