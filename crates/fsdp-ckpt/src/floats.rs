//! Conversions between floating-point values in memory and the float types of files.
//!
//! Widening (`BF16`, `F16`, `F32` to `f32` or `f64`) is exact. Narrowing rounds once, to nearest with ties to even, and
//! fails for a finite value that would become infinite. Slices are converted whole; callers cut them into bounded
//! chunks.

use std::path::Path;

use half::{bf16, f16};

use crate::{error::Error, safetensors::TensorType};

/// Number of elements that readers and writers convert per chunk.
pub(crate) const CHUNK_ELEMENTS: usize = 1 << 17;

/// A finite value that would become infinite in the target type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct OutOfRange {
    /// Index in the converted slice.
    pub(crate) index: usize,
    pub(crate) value: f64,
    pub(crate) target: TensorType,
}

impl OutOfRange {
    /// Converts it to an error that names the tensor, for a slice that begins at element `first` of the tensor.
    pub(crate) fn in_tensor(self, path: &Path, tensor: &str, first: u64) -> Error {
        let OutOfRange { index, value, target } = self;
        let element = first + index as u64;
        let reason = format!(
            "tensor `{tensor}`: {value:e} (element {element}) does not fit in {target}; choose a type with a larger \
             range"
        );
        Error::bad_request(path, reason)
    }
}

/// Refuses a tensor whose dtype does not convert to and from floating-point values.
pub(crate) fn expect_convertible(path: &Path, tensor: &str, dtype: TensorType) -> Result<(), Error> {
    if dtype.is_convertible() {
        return Ok(());
    }
    let reason = format!(
        "tensor `{tensor}` is {dtype}, but only F64, F32, BF16 and F16 convert to and from floating-point values; read \
         or write its bytes with `read_rows` or `write_rows`"
    );
    Err(Error::bad_request(path, reason))
}

/// Number of elements that [`between`] converts at a time, in an array on the stack.
const STEP_ELEMENTS: usize = 512;

/// Converts elements from one convertible dtype to another. Both slices hold the same number of elements.
pub(crate) fn between(
    from: TensorType,
    to: TensorType,
    bytes: &[u8],
    out: &mut [u8],
) -> Result<(), OutOfRange> {
    if from == TensorType::F64 || to == TensorType::F64 {
        between_through([0_f64; STEP_ELEMENTS], from, to, bytes, out)
    } else {
        between_through([0_f32; STEP_ELEMENTS], from, to, bytes, out)
    }
}

fn between_through<T: Real>(
    mut values: [T; STEP_ELEMENTS],
    from: TensorType,
    to: TensorType,
    bytes: &[u8],
    out: &mut [u8],
) -> Result<(), OutOfRange> {
    let (from_size, to_size) = (from.size_bytes(), to.size_bytes());
    assert_eq!(bytes.len() / from_size, out.len() / to_size, "both slices hold the same elements");
    let steps = bytes.chunks(STEP_ELEMENTS * from_size).zip(out.chunks_mut(STEP_ELEMENTS * to_size));
    for (step, (bytes, out)) in steps.enumerate() {
        let values = &mut values[..bytes.len() / from_size];
        let in_whole = |found: OutOfRange| OutOfRange { index: step * STEP_ELEMENTS + found.index, ..found };
        T::decode(from, bytes, values).map_err(in_whole)?;
        T::encode(to, values, out).map_err(in_whole)?;
    }
    Ok(())
}

/// Converts `out.len()` elements from a convertible `dtype`, exactly.
pub(crate) fn decode(dtype: TensorType, bytes: &[u8], out: &mut [f64]) {
    f64::decode(dtype, bytes, out)
        .unwrap_or_else(|OutOfRange { .. }| unreachable!("every float fits in 64 bits"));
}

/// The type of values in memory: `f32` or `f64`.
pub(crate) trait Real: Copy {
    /// Converts `out.len()` elements from a convertible `dtype`.
    fn decode(dtype: TensorType, bytes: &[u8], out: &mut [Self]) -> Result<(), OutOfRange>;

    /// Converts `values.len()` elements to a convertible `dtype`.
    fn encode(dtype: TensorType, values: &[Self], out: &mut [u8]) -> Result<(), OutOfRange>;
}

impl Real for f32 {
    fn decode(dtype: TensorType, bytes: &[u8], out: &mut [f32]) -> Result<(), OutOfRange> {
        match dtype {
            TensorType::F32 => decode_each(bytes, out, f32::from_le_bytes),
            TensorType::Bf16 => decode_each(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
            TensorType::F16 => decode_each(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
            TensorType::F64 => {
                let wide = bytes.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b));
                check_range(wide, TensorType::F32)?;
                decode_each(bytes, out, |b| f64::from_le_bytes(b) as f32);
            }
            _ => unreachable!("callers check `is_convertible`"),
        }
        Ok(())
    }

    fn encode(dtype: TensorType, values: &[f32], out: &mut [u8]) -> Result<(), OutOfRange> {
        match dtype {
            TensorType::F32 => encode_each(values, out, f32::to_le_bytes),
            TensorType::F64 => encode_each(values, out, |v| f64::from(v).to_le_bytes()),
            TensorType::Bf16 | TensorType::F16 => {
                check_range(values.iter().map(|&v| f64::from(v)), dtype)?;
                encode_halves(dtype, values, out, |v| v);
            }
            _ => unreachable!("callers check `is_convertible`"),
        }
        Ok(())
    }
}

impl Real for f64 {
    fn decode(dtype: TensorType, bytes: &[u8], out: &mut [f64]) -> Result<(), OutOfRange> {
        match dtype {
            TensorType::F64 => decode_each(bytes, out, f64::from_le_bytes),
            TensorType::F32 => decode_each(bytes, out, |b| f64::from(f32::from_le_bytes(b))),
            TensorType::Bf16 => decode_each(bytes, out, |b| bf16::from_le_bytes(b).to_f64()),
            TensorType::F16 => decode_each(bytes, out, |b| f16::from_le_bytes(b).to_f64()),
            _ => unreachable!("callers check `is_convertible`"),
        }
        Ok(())
    }

    fn encode(dtype: TensorType, values: &[f64], out: &mut [u8]) -> Result<(), OutOfRange> {
        if dtype != TensorType::F64 {
            check_range(values.iter().copied(), dtype)?;
        }
        match dtype {
            TensorType::F64 => encode_each(values, out, f64::to_le_bytes),
            TensorType::F32 => encode_each(values, out, |v| (v as f32).to_le_bytes()),
            TensorType::Bf16 | TensorType::F16 => encode_halves(dtype, values, out, round_to_odd),
            _ => unreachable!("callers check `is_convertible`"),
        }
        Ok(())
    }
}

fn decode_each<const N: usize, T>(bytes: &[u8], out: &mut [T], convert: impl Fn([u8; N]) -> T) {
    let (elements, rest) = bytes.as_chunks::<N>();
    assert!(rest.is_empty() && elements.len() == out.len(), "bytes and elements describe the same rows");
    for (out, &element) in out.iter_mut().zip(elements) {
        *out = convert(element);
    }
}

fn encode_each<const N: usize, T: Copy>(values: &[T], out: &mut [u8], convert: impl Fn(T) -> [u8; N]) {
    let (elements, rest) = out.as_chunks_mut::<N>();
    assert!(rest.is_empty() && elements.len() == values.len(), "bytes and elements describe the same rows");
    for (element, &value) in elements.iter_mut().zip(values) {
        *element = convert(value);
    }
}

fn encode_halves<T: Copy>(dtype: TensorType, values: &[T], out: &mut [u8], to_f32: impl Fn(T) -> f32) {
    if dtype == TensorType::Bf16 {
        encode_each(values, out, |v| bf16::from_f32(to_f32(v)).to_le_bytes());
    } else {
        encode_each(values, out, |v| f16::from_f32(to_f32(v)).to_le_bytes());
    }
}

/// Rounds to `f32` so that rounding the result again, to half precision, equals rounding once: an inexact result gets
/// an odd last bit, so it is never a tie of the second rounding.
fn round_to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let exact = f64::from(nearest) == value || value.is_nan();
    let bits = nearest.to_bits();
    if exact || bits & 1 == 1 {
        nearest
    } else if f64::from(nearest).abs() > value.abs() {
        f32::from_bits(bits - 1)
    } else {
        f32::from_bits(bits + 1)
    }
}

/// Fails with the first finite value that rounds to infinity in `target`.
fn check_range(values: impl Iterator<Item = f64> + Clone, target: TensorType) -> Result<(), OutOfRange> {
    // Half a unit in the last place above the largest finite value. This is a tie, which rounds to infinity (even).
    let limit = match target {
        TensorType::F16 => 65520.0,
        TensorType::Bf16 => f64::from(f32::from_bits(0x7f7f_8000)),
        _ => f64::from(f32::MAX) + (103_f64).exp2(),
    };
    let is_outside = |value: f64| value.abs() >= limit && value.is_finite();
    // Usually no value is outside. A loop without an exit vectorizes.
    if !values.clone().fold(false, |any, value| any | is_outside(value)) {
        return Ok(());
    }
    let (index, value) = values.enumerate().find(|&(_, value)| is_outside(value)).expect("one was found");
    Err(OutOfRange { index, value, target })
}

#[cfg(test)]
mod tests;
