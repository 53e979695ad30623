//! Encoding and decoding of rows in NF4, with the arithmetic of bitsandbytes on a CPU.

use super::{BLOCK, CodeBook, Nf4, ScaleFormat};

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
    pub fn new(format: ScaleFormat, magnitudes: Vec<f32>) -> Self {
        match format {
            ScaleFormat::Single => Scales::Single(magnitudes),
            ScaleFormat::Nested => {
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
        }
    }

    /// Appends the part of a row's bytes that is for its scales.
    fn write(&self, matrix: Nf4, row: usize, bytes: &mut Vec<u8>) {
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
        }
    }
}

/// The largest magnitude; NaN if there is one.
fn largest(values: impl Iterator<Item = f32>) -> f32 {
    values.fold(
        0.0,
        |largest: f32, value| if value.abs() <= largest || largest.is_nan() { largest } else { value.abs() },
    )
}

/// A value as a fraction of a scale.
fn scaled(value: f32, scale: f32) -> f32 {
    (value * (1.0 / scale.max(1e-38))).clamp(-1.0, 1.0)
}

impl Nf4 {
    /// The largest magnitude of each block of some elements, whose number is a multiple of [`BLOCK`].
    pub fn magnitudes(values: &[f32]) -> impl Iterator<Item = f32> {
        values.chunks(BLOCK).map(|block| largest(block.iter().copied()))
    }

    /// Appends the bytes of a row with these elements.
    pub fn encode(&self, scales: &Scales, row: usize, values: &[f32], bytes: &mut Vec<u8>) {
        for block in values.chunks(BLOCK) {
            let scale = largest(block.iter().copied());
            let code = |value: f32| nearest(scaled(value, scale));
            bytes.extend(block.chunks(2).map(|pair| code(pair[0]) << 4 | code(pair[1])));
        }
        scales.write(*self, row, bytes);
    }

    /// Appends the bytes of a row with these codes, two per byte.
    pub fn join(&self, scales: &Scales, row: usize, codes: &[u8], bytes: &mut Vec<u8>) {
        bytes.extend(codes);
        scales.write(*self, row, bytes);
    }

    /// The scale of each block of a row.
    pub(crate) fn row_scales<'a>(&self, row: usize, bytes: &'a [u8]) -> impl Iterator<Item = f32> + 'a {
        let (blocks, format) = (self.blocks(), self.scales);
        let (first, bytes) = (row * blocks, &bytes[self.columns / 2..]);
        let float = move |offset: usize| {
            f32::from_le_bytes(bytes[offset..][..4].try_into().expect("a scale has four bytes"))
        };
        let nested_max = self.nested_max();
        (0..blocks).map(move |block| match format {
            ScaleFormat::Single => float(4 * block),
            ScaleFormat::Nested => {
                let nested = (first + block) / NESTED_BLOCK - first / NESTED_BLOCK;
                let code = CodeBook::signed().values[usize::from(bytes[block])];
                code * float(blocks + 4 * nested) + float(blocks + 4 * nested_max)
            }
        })
    }

    /// Decodes a row.
    ///
    /// # Panics
    /// If `bytes` or `values` do not have the length of a row.
    pub fn decode(&self, row: usize, bytes: &[u8], values: &mut [f32]) {
        assert_eq!((bytes.len(), values.len()), (self.stored().row_bytes, self.columns), "one row");
        let codes = bytes[..self.columns / 2].chunks(BLOCK / 2);
        for ((scale, codes), values) in self.row_scales(row, bytes).zip(codes).zip(values.chunks_mut(BLOCK)) {
            for (code, pair) in codes.iter().zip(values.chunks_mut(2)) {
                pair[0] = VALUES[usize::from(code >> 4)] * scale;
                pair[1] = VALUES[usize::from(code & 15)] * scale;
            }
        }
    }
}

/// The code of the nearest of the 16 numbers; of two equally near ones, the lower.
fn nearest(value: f32) -> u8 {
    let is_above = |pair: &[f32]| value > (pair[0] + pair[1]) / 2.0;
    VALUES.windows(2).map(|pair| u8::from(is_above(pair))).sum()
}
