//! Element types of tensors in files. There are more than training supports, since files are also converted.
//!
//! An element of a type smaller than a byte is the least number of values that fills whole bytes: two of `F4`, as in
//! PyTorch's `float4_e2m1fn_x2`, and four of `F6_*`. Shapes count elements everywhere but in the headers of files, where
//! the last dimension counts values. A tensor whose rows do not fill whole bytes is not supported.

use std::fmt;

use fsdp_core::DType;
use serde::{Serialize, Serializer};

/// The element type of a tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the names are those of the format")]
pub enum TensorType {
    Bool,
    U8,
    I8,
    F4,
    F8E5M2,
    F8E4M3,
    F8E8M0,
    F8E4M3Fnuz,
    F8E5M2Fnuz,
    F6E2M3,
    F6E3M2,
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

/// Facts about a type: its size in bytes, its names in headers and in PyTorch, and the PyTorch class of its storages.
/// Newer types have no such class, since their storages are untyped, and some have no name in PyTorch.
struct Facts(TensorType, usize, &'static str, Option<&'static str>, Option<&'static str>);

/// All types, in the order of the enum.
const TABLE: [Facts; 22] = [
    Facts(TensorType::Bool, 1, "BOOL", Some("bool"), Some("BoolStorage")),
    Facts(TensorType::U8, 1, "U8", Some("uint8"), Some("ByteStorage")),
    Facts(TensorType::I8, 1, "I8", Some("int8"), Some("CharStorage")),
    Facts(TensorType::F4, 1, "F4", Some("float4_e2m1fn_x2"), None),
    Facts(TensorType::F8E5M2, 1, "F8_E5M2", Some("float8_e5m2"), None),
    Facts(TensorType::F8E4M3, 1, "F8_E4M3", Some("float8_e4m3fn"), None),
    Facts(TensorType::F8E8M0, 1, "F8_E8M0", Some("float8_e8m0fnu"), None),
    Facts(TensorType::F8E4M3Fnuz, 1, "F8_E4M3FNUZ", Some("float8_e4m3fnuz"), None),
    Facts(TensorType::F8E5M2Fnuz, 1, "F8_E5M2FNUZ", Some("float8_e5m2fnuz"), None),
    Facts(TensorType::F6E2M3, 3, "F6_E2M3", None, None),
    Facts(TensorType::F6E3M2, 3, "F6_E3M2", None, None),
    Facts(TensorType::U16, 2, "U16", Some("uint16"), None),
    Facts(TensorType::I16, 2, "I16", Some("int16"), Some("ShortStorage")),
    Facts(TensorType::F16, 2, "F16", Some("float16"), Some("HalfStorage")),
    Facts(TensorType::Bf16, 2, "BF16", Some("bfloat16"), Some("BFloat16Storage")),
    Facts(TensorType::U32, 4, "U32", Some("uint32"), None),
    Facts(TensorType::I32, 4, "I32", Some("int32"), Some("IntStorage")),
    Facts(TensorType::F32, 4, "F32", Some("float32"), Some("FloatStorage")),
    Facts(TensorType::U64, 8, "U64", Some("uint64"), None),
    Facts(TensorType::I64, 8, "I64", Some("int64"), Some("LongStorage")),
    Facts(TensorType::F64, 8, "F64", Some("float64"), Some("DoubleStorage")),
    Facts(TensorType::C64, 8, "C64", Some("complex64"), Some("ComplexFloatStorage")),
];

// `TensorType::facts` indexes the table by the discriminant.
const _: () = {
    let mut at = 0;
    while at < TABLE.len() {
        assert!(TABLE[at].0 as usize == at);
        at += 1;
    }
};

impl TensorType {
    /// All types.
    pub fn all() -> impl Iterator<Item = TensorType> {
        TABLE.iter().map(|facts| facts.0)
    }

    const fn facts(self) -> &'static Facts {
        &TABLE[self as usize]
    }

    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        self.facts().1
    }

    /// The name in a safetensors header.
    pub const fn name(self) -> &'static str {
        self.facts().2
    }

    /// Number of values in an element: more than one for types smaller than a byte.
    pub const fn values(self) -> usize {
        match self {
            TensorType::F4 => 2,
            TensorType::F6E2M3 | TensorType::F6E3M2 => 4,
            _ => 1,
        }
    }

    /// The shape of a tensor whose last dimension counts values, as headers and people do.
    pub fn value_shape(self, shape: &[u64]) -> Vec<u64> {
        let mut shape = shape.to_vec();
        if let Some(last) = shape.last_mut() {
            *last = last.saturating_mul(self.values() as u64);
        }
        shape
    }

    /// The largest power of two by which offsets of elements are divisible.
    pub(crate) const fn alignment(self) -> usize {
        1 << self.size_bytes().trailing_zeros()
    }

    /// The name of the dtype in the Python module `torch`; `None` if it has none.
    pub(crate) const fn torch_name(self) -> Option<&'static str> {
        self.facts().3
    }

    /// The class of the dtype's storages in the Python module `torch`; `None` if they are untyped.
    pub(crate) const fn torch_storage(self) -> Option<&'static str> {
        self.facts().4
    }

    /// The type with this name in a safetensors header; `None` if there is none.
    pub fn from_name(name: &str) -> Option<TensorType> {
        TensorType::all().find(|ty| ty.name() == name)
    }

    /// Whether elements convert to and from `f32` and `f64`: `F64`, `F32`, `BF16` and `F16`.
    pub const fn is_convertible(self) -> bool {
        matches!(self, TensorType::F64 | TensorType::F32 | TensorType::Bf16 | TensorType::F16)
    }

    /// All names, for messages.
    pub(crate) fn list() -> String {
        TensorType::all().map(TensorType::name).collect::<Vec<_>>().join(", ")
    }
}

impl From<DType> for TensorType {
    fn from(dtype: DType) -> TensorType {
        match dtype {
            DType::F32 => TensorType::F32,
            DType::F64 => TensorType::F64,
            DType::Bf16 => TensorType::Bf16,
            DType::F16 => TensorType::F16,
            DType::U8 => TensorType::U8,
            DType::U32 => TensorType::U32,
            DType::I64 => TensorType::I64,
        }
    }
}

impl Serialize for TensorType {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.name())
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
