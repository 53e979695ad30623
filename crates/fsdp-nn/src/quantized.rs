//! Matrices of 4-bit numbers: the weights of a frozen base (QLoRA: Dettmers et al., 2023).
//!
//! A matrix is stored as rows of bytes, and a row has everything that it is decoded from, so matrices are sharded and
//! gathered by rows like all others. The decoded elements are `f32`.

mod dynamic;
mod nf4;

use fsdp_core::model::Quantized;

pub use dynamic::CodeBook;
pub use nf4::{NESTED_BLOCK, Nested, Scales, VALUES};

/// Elements with a common scale.
pub const BLOCK: usize = 64;

/// How the scales of the blocks are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ScaleFormat {
    /// As `f32`: 4.5 bits per element.
    Single,
    /// In 8 bits, with scales of their own (double quantization): 4.1 bits per element.
    Nested,
}

/// A matrix in NF4: every block of [`BLOCK`] elements of a row has a scale, its largest magnitude, and each element is the
/// product of the scale and one of 16 numbers.
///
/// A row has two elements per byte, the first one in the upper half; then the scale of each block; then, if scales are
/// nested, the scale of each block of [`NESTED_BLOCK`] scales that the row has a part of, and the number that was
/// subtracted from all scales. Blocks of scales are counted through the whole matrix, as in bitsandbytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Nf4 {
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row: a multiple of [`BLOCK`].
    pub columns: usize,
    /// How scales are stored.
    pub scales: ScaleFormat,
}

impl Nf4 {
    /// Blocks of a row.
    pub fn blocks(&self) -> usize {
        self.columns / BLOCK
    }

    /// The rows of bytes that store it.
    pub fn stored(&self) -> Quantized {
        let scale_bytes = match self.scales {
            ScaleFormat::Single => 4 * self.blocks(),
            ScaleFormat::Nested => self.blocks() + 4 * (self.nested_max() + 1),
        };
        Quantized { rows: self.rows, row_bytes: self.columns / 2 + scale_bytes }
    }

    /// The most blocks of scales that a row has a part of.
    fn nested_max(&self) -> usize {
        match self.blocks() % NESTED_BLOCK {
            0 => self.blocks() / NESTED_BLOCK,
            _ => (self.blocks() - 1).div_ceil(NESTED_BLOCK) + 1,
        }
    }
}

#[cfg(test)]
mod tests;
