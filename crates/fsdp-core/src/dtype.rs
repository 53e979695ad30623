//! Element types of buffers.
//!
//! Dtypes are run-time values: a schedule, a layout or a checkpoint names one, and a backend dispatches on it once per
//! call. The enum has only the dtypes that training needs; file formats define more.

use std::fmt;

/// The type of the elements of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DType {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 double precision.
    F64,
    /// bfloat16: the upper half of an `F32`.
    Bf16,
    /// IEEE 754 half precision.
    F16,
    /// Unsigned 8-bit integers, for quantized optimizer state.
    U8,
    /// Unsigned 32-bit integers, for token ids.
    U32,
    /// Signed 64-bit integers, for the digits of exact sums.
    I64,
}

impl DType {
    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::Bf16 | DType::F16 => 2,
            DType::F32 | DType::U32 => 4,
            DType::F64 | DType::I64 => 8,
        }
    }

    /// Whether the elements are floating-point numbers.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::Bf16 | DType::F16)
    }

    /// The dtype of the master copy (and optimizer state) of parameters that are computed in this dtype: `F64` for
    /// `F64`, otherwise `F32`.
    pub const fn master(self) -> DType {
        match self {
            DType::F64 => DType::F64,
            _ => DType::F32,
        }
    }

    /// The largest value of the master dtype that remains finite when rounded to this dtype (to nearest even).
    pub const fn largest(self) -> f64 {
        match self {
            DType::F64 => f64::MAX,
            // The next value is halfway to the power of two that bf16 cannot represent.
            DType::Bf16 => f32::from_bits(0x7f7f_7fff) as f64,
            // The next value is 65520, halfway to the power of two that f16 cannot represent.
            DType::F16 => f32::from_bits(0x477f_efff) as f64,
            _ => f32::MAX as f64,
        }
    }

    /// The name used in configuration files and reports.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::U8 => "u8",
            DType::U32 => "u32",
            DType::I64 => "i64",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
