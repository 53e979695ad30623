//! The names that torch has for element types.

use crate::safetensors::TensorType;

/// The name of the dtype in module `torch`.
pub(crate) fn dtype_name(dtype: TensorType) -> &'static str {
    match dtype {
        TensorType::Bool => "bool",
        TensorType::U8 => "uint8",
        TensorType::I8 => "int8",
        TensorType::F8E5M2 => "float8_e5m2",
        TensorType::F8E4M3 => "float8_e4m3fn",
        TensorType::F8E8M0 => "float8_e8m0fnu",
        TensorType::F8E4M3Fnuz => "float8_e4m3fnuz",
        TensorType::F8E5M2Fnuz => "float8_e5m2fnuz",
        TensorType::U16 => "uint16",
        TensorType::I16 => "int16",
        TensorType::F16 => "float16",
        TensorType::Bf16 => "bfloat16",
        TensorType::U32 => "uint32",
        TensorType::I32 => "int32",
        TensorType::F32 => "float32",
        TensorType::U64 => "uint64",
        TensorType::I64 => "int64",
        TensorType::F64 => "float64",
        TensorType::C64 => "complex64",
    }
}

/// The class of the dtype's storages in module `torch`. Newer dtypes have none: their storages are untyped.
pub(crate) fn storage_class(dtype: TensorType) -> Option<&'static str> {
    match dtype {
        TensorType::Bool => Some("BoolStorage"),
        TensorType::U8 => Some("ByteStorage"),
        TensorType::I8 => Some("CharStorage"),
        TensorType::I16 => Some("ShortStorage"),
        TensorType::F16 => Some("HalfStorage"),
        TensorType::Bf16 => Some("BFloat16Storage"),
        TensorType::I32 => Some("IntStorage"),
        TensorType::F32 => Some("FloatStorage"),
        TensorType::I64 => Some("LongStorage"),
        TensorType::F64 => Some("DoubleStorage"),
        TensorType::C64 => Some("ComplexFloatStorage"),
        TensorType::F8E5M2
        | TensorType::F8E4M3
        | TensorType::F8E8M0
        | TensorType::F8E4M3Fnuz
        | TensorType::F8E5M2Fnuz
        | TensorType::U16
        | TensorType::U32
        | TensorType::U64 => None,
    }
}
