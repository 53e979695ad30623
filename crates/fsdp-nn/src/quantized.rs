//! Matrices of 4-bit numbers: the weights of a frozen base (QLoRA: Dettmers et al., 2023).
//!
//! A matrix is stored as rows of bytes, and a row has everything that it is decoded from, so matrices are sharded and
//! gathered by rows like all others. The decoded elements are `f32`.

mod dynamic;
mod mxfp4;
mod nf4;

use fsdp_core::model::Quantized;

pub use dynamic::CodeBook;
pub use nf4::{BLOCK, NESTED_BLOCK, Nested, Scales, VALUES};

/// How 4-bit numbers and the scales of their blocks are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Format {
    /// NF4 with double quantization: scales in 8 bits, with scales of their own; 4.1 bits per element.
    Nf4,
    /// NF4 with scales in `f32`: 4.5 bits per element.
    Nf4Single,
    /// MXFP4 (Open Compute Project, Microscaling Formats 1.0): scales are powers of two; 4.25 bits per element.
    Mxfp4,
}

/// A matrix of 4-bit numbers: every block of elements of a row has a scale, and each element is the product of the scale
/// and one of 16 numbers.
///
/// A row has two elements per byte (NF4: the first one in the upper half; MXFP4: in the lower half); then the scale of each
/// block; then, if scales are nested, the scale of each block of [`NESTED_BLOCK`] scales that the row has a part of, and the number
/// that was subtracted from all scales. Blocks of scales are counted through the whole matrix, as in bitsandbytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Packed {
    /// Number of rows: outputs of a linear map.
    pub rows: usize,
    /// Elements of a row: a multiple of the elements of a block.
    pub columns: usize,
    /// How it is stored.
    pub format: Format,
}

impl Format {
    /// Elements with a common scale.
    pub fn block(self) -> usize {
        match self {
            Format::Nf4 | Format::Nf4Single => BLOCK,
            Format::Mxfp4 => mxfp4::BLOCK,
        }
    }

    /// The 16 numbers.
    pub fn values(self) -> [f32; 16] {
        match self {
            Format::Nf4 | Format::Nf4Single => VALUES,
            Format::Mxfp4 => mxfp4::VALUES,
        }
    }

    /// The largest magnitude of each block of some elements, which are whole blocks.
    pub fn magnitudes(self, values: &[f32]) -> impl Iterator<Item = f32> {
        values.chunks(self.block()).map(|block| nf4::largest(block.iter().copied()))
    }

    /// Where the first and the second code of a byte begin, in bits.
    pub fn shifts(self) -> [u8; 2] {
        match self {
            Format::Nf4 | Format::Nf4Single => [4, 0],
            Format::Mxfp4 => [0, 4],
        }
    }
}

impl Packed {
    /// Blocks of a row.
    pub fn blocks(&self) -> usize {
        self.columns / self.format.block()
    }

    /// The rows of bytes that store it.
    pub fn stored(&self) -> Quantized {
        let scale_bytes = match self.format {
            Format::Nf4 => self.blocks() + 4 * (self.nested_max() + 1),
            Format::Nf4Single => 4 * self.blocks(),
            Format::Mxfp4 => self.blocks(),
        };
        Quantized { rows: self.rows, row_bytes: self.columns / 2 + scale_bytes }
    }

    /// The scale of each block of a row.
    pub(crate) fn row_scales<'a>(&self, row: usize, bytes: &'a [u8]) -> impl Iterator<Item = f32> + 'a {
        let (blocks, format, nested_max) = (self.blocks(), self.format, self.nested_max());
        let (first, bytes) = (row * blocks, &bytes[self.columns / 2..]);
        let float = move |offset: usize| {
            f32::from_le_bytes(bytes[offset..][..4].try_into().expect("a scale has four bytes"))
        };
        (0..blocks).map(move |block| match format {
            Format::Nf4Single => float(4 * block),
            Format::Nf4 => {
                let nested = (first + block) / NESTED_BLOCK - first / NESTED_BLOCK;
                let code = CodeBook::signed().values[usize::from(bytes[block])];
                code * float(blocks + 4 * nested) + float(blocks + 4 * nested_max)
            }
            Format::Mxfp4 => mxfp4::power(bytes[block]),
        })
    }

    /// Decodes a row.
    ///
    /// # Panics
    /// If `bytes` or `values` do not have the length of a row.
    pub fn decode(&self, row: usize, bytes: &[u8], values: &mut [f32]) {
        assert_eq!((bytes.len(), values.len()), (self.stored().row_bytes, self.columns), "one row");
        self.decode_with(row, bytes, values, |value| value);
    }

    /// Decodes a row whose lengths are right, to elements of any type.
    pub(crate) fn decode_with<E: Copy>(
        &self,
        row: usize,
        bytes: &[u8],
        values: &mut [E],
        element: impl Fn(f32) -> E,
    ) {
        let (block, [first, second]) = (self.format.block(), self.format.shifts());
        let codes = bytes[..self.columns / 2].chunks_exact(block / 2);
        let scales = self.row_scales(row, bytes);
        for ((scale, codes), values) in scales.zip(codes).zip(values.chunks_exact_mut(block)) {
            // The 16 elements that a block may have.
            let elements = self.format.values().map(|value| element(value * scale));
            for (code, pair) in codes.iter().zip(values.chunks_exact_mut(2)) {
                pair[0] = elements[usize::from(code >> first & 15)];
                pair[1] = elements[usize::from(code >> second & 15)];
            }
        }
    }
}

#[cfg(test)]
mod tests;
