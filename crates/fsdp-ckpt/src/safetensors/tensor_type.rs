//! Element types of tensors in files: more than training knows, since files are also converted.
//!
//! Left out are the types smaller than a byte (`F4`, `F6_*`), whose tensors have no whole rows.

use std::fmt;

use fsdp_core::DType;

/// The type of the elements of a tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the names are those of the format")]
pub enum TensorType {
    Bool,
    U8,
    I8,
    F8E5M2,
    F8E4M3,
    F8E8M0,
    F8E4M3Fnuz,
    F8E5M2Fnuz,
    U16,
    I16,
    F16,
    Bf16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
    C64,
}

impl TensorType {
    /// Every type, narrow ones first.
    pub const ALL: [TensorType; 19] = [
        TensorType::Bool,
        TensorType::U8,
        TensorType::I8,
        TensorType::F8E5M2,
        TensorType::F8E4M3,
        TensorType::F8E8M0,
        TensorType::F8E4M3Fnuz,
        TensorType::F8E5M2Fnuz,
        TensorType::U16,
        TensorType::I16,
        TensorType::F16,
        TensorType::Bf16,
        TensorType::U32,
        TensorType::I32,
        TensorType::F32,
        TensorType::U64,
        TensorType::I64,
        TensorType::F64,
        TensorType::C64,
    ];

    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        use TensorType::*;
        match self {
            Bool | U8 | I8 | F8E5M2 | F8E4M3 | F8E8M0 | F8E4M3Fnuz | F8E5M2Fnuz => 1,
            U16 | I16 | F16 | Bf16 => 2,
            U32 | I32 | F32 => 4,
            U64 | I64 | F64 | C64 => 8,
        }
    }

    /// The name in the header of a file.
    pub const fn name(self) -> &'static str {
        match self {
            TensorType::Bool => "BOOL",
            TensorType::U8 => "U8",
            TensorType::I8 => "I8",
            TensorType::F8E5M2 => "F8_E5M2",
            TensorType::F8E4M3 => "F8_E4M3",
            TensorType::F8E8M0 => "F8_E8M0",
            TensorType::F8E4M3Fnuz => "F8_E4M3FNUZ",
            TensorType::F8E5M2Fnuz => "F8_E5M2FNUZ",
            TensorType::U16 => "U16",
            TensorType::I16 => "I16",
            TensorType::F16 => "F16",
            TensorType::Bf16 => "BF16",
            TensorType::U32 => "U32",
            TensorType::I32 => "I32",
            TensorType::F32 => "F32",
            TensorType::U64 => "U64",
            TensorType::I64 => "I64",
            TensorType::F64 => "F64",
            TensorType::C64 => "C64",
        }
    }

    /// The type with this name in a header.
    pub fn from_name(name: &str) -> Option<TensorType> {
        TensorType::ALL.into_iter().find(|ty| ty.name() == name)
    }

    /// Whether elements convert to and from `f32` and `f64`: `F64`, `F32`, `BF16` and `F16`.
    pub const fn is_convertible(self) -> bool {
        matches!(self, TensorType::F64 | TensorType::F32 | TensorType::Bf16 | TensorType::F16)
    }

    /// The dtype of training with the same elements, if there is one.
    pub const fn dtype(self) -> Option<DType> {
        match self {
            TensorType::F32 => Some(DType::F32),
            TensorType::F64 => Some(DType::F64),
            TensorType::Bf16 => Some(DType::Bf16),
            TensorType::U32 => Some(DType::U32),
            TensorType::I64 => Some(DType::I64),
            _ => None,
        }
    }

    /// All names, for messages.
    pub(crate) fn list() -> String {
        TensorType::ALL.map(TensorType::name).join(", ")
    }
}

impl From<DType> for TensorType {
    fn from(dtype: DType) -> TensorType {
        match dtype {
            DType::F32 => TensorType::F32,
            DType::F64 => TensorType::F64,
            DType::Bf16 => TensorType::Bf16,
            DType::U32 => TensorType::U32,
            DType::I64 => TensorType::I64,
        }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
