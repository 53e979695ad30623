//! Element types of tensors in files. There are more than training supports, since files are also converted.
//!
//! Types smaller than a byte (`F4`, `F6_*`) are not supported, since their tensors have no whole rows.

use std::fmt;

use fsdp_core::DType;

/// The element type of a tensor in a file.
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

/// Facts about a type: its size in bytes, its names in headers and in PyTorch, and the PyTorch class of its storages.
/// Newer types have no such class, since their storages are untyped.
struct Facts(TensorType, usize, &'static str, &'static str, Option<&'static str>);

/// All types, in the order of the enum.
const TABLE: [Facts; 19] = [
    Facts(TensorType::Bool, 1, "BOOL", "bool", Some("BoolStorage")),
    Facts(TensorType::U8, 1, "U8", "uint8", Some("ByteStorage")),
    Facts(TensorType::I8, 1, "I8", "int8", Some("CharStorage")),
    Facts(TensorType::F8E5M2, 1, "F8_E5M2", "float8_e5m2", None),
    Facts(TensorType::F8E4M3, 1, "F8_E4M3", "float8_e4m3fn", None),
    Facts(TensorType::F8E8M0, 1, "F8_E8M0", "float8_e8m0fnu", None),
    Facts(TensorType::F8E4M3Fnuz, 1, "F8_E4M3FNUZ", "float8_e4m3fnuz", None),
    Facts(TensorType::F8E5M2Fnuz, 1, "F8_E5M2FNUZ", "float8_e5m2fnuz", None),
    Facts(TensorType::U16, 2, "U16", "uint16", None),
    Facts(TensorType::I16, 2, "I16", "int16", Some("ShortStorage")),
    Facts(TensorType::F16, 2, "F16", "float16", Some("HalfStorage")),
    Facts(TensorType::Bf16, 2, "BF16", "bfloat16", Some("BFloat16Storage")),
    Facts(TensorType::U32, 4, "U32", "uint32", None),
    Facts(TensorType::I32, 4, "I32", "int32", Some("IntStorage")),
    Facts(TensorType::F32, 4, "F32", "float32", Some("FloatStorage")),
    Facts(TensorType::U64, 8, "U64", "uint64", None),
    Facts(TensorType::I64, 8, "I64", "int64", Some("LongStorage")),
    Facts(TensorType::F64, 8, "F64", "float64", Some("DoubleStorage")),
    Facts(TensorType::C64, 8, "C64", "complex64", Some("ComplexFloatStorage")),
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
    /// All types, in order of increasing size.
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

    /// The name of the dtype in the Python module `torch`.
    pub(crate) const fn torch_name(self) -> &'static str {
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

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
