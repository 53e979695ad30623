//! Buffers as bytes on the host, and back.
//!
//! Bytes are little-endian in the buffer's own dtype. Host slices have no bf16: such buffers are read as
//! `f32`, which is exact, and the lower halves, all zero, are left away.

use fsdp_core::memory::{Buffer, HostSlice, HostSliceMut, Slice, SliceMut};
use fsdp_core::{DType, Error, Memory, Queue};

use crate::bf16;

/// The elements of a whole buffer, after all earlier work of `queue`.
pub(crate) fn read<M: Memory>(memory: &M, queue: Queue, buffer: &M::Buffer) -> Result<Vec<u8>, Error> {
    let (len, src) = (buffer.len(), Slice::whole(buffer));
    match buffer.dtype() {
        dtype @ (DType::F32 | DType::Bf16) => {
            let mut host = vec![0f32; len];
            memory.read(queue, src, HostSliceMut::F32(&mut host))?;
            Ok(match dtype {
                DType::Bf16 => host.iter().flat_map(|&value| bf16::to_bits(value).to_le_bytes()).collect(),
                _ => host.iter().flat_map(|value| value.to_le_bytes()).collect(),
            })
        }
        DType::F64 => {
            let mut host = vec![0f64; len];
            memory.read(queue, src, HostSliceMut::F64(&mut host))?;
            Ok(host.iter().flat_map(|value| value.to_le_bytes()).collect())
        }
        DType::I64 => {
            let mut host = vec![0i64; len];
            memory.read(queue, src, HostSliceMut::I64(&mut host))?;
            Ok(host.iter().flat_map(|value| value.to_le_bytes()).collect())
        }
        DType::U32 => Err(unsupported()),
    }
}

/// Fills a range of a buffer from bytes, on `queue`.
pub(crate) fn write<M: Memory>(
    memory: &M,
    queue: Queue,
    bytes: &[u8],
    dst: SliceMut<'_, M::Buffer>,
) -> Result<(), Error> {
    match dst.buffer.dtype() {
        DType::F32 => memory.write(queue, HostSlice::F32(&elements(bytes, f32::from_le_bytes)), dst),
        DType::F64 => memory.write(queue, HostSlice::F64(&elements(bytes, f64::from_le_bytes)), dst),
        DType::I64 => memory.write(queue, HostSlice::I64(&elements(bytes, i64::from_le_bytes)), dst),
        DType::Bf16 => {
            let host = elements(bytes, |bytes| bf16::from_bits(u16::from_le_bytes(bytes)));
            memory.write(queue, HostSlice::F32(&host), dst)
        }
        DType::U32 => Err(unsupported()),
    }
}

fn elements<const N: usize, T>(bytes: &[u8], decode: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|&chunk| decode(chunk)).collect()
}

fn unsupported() -> Error {
    Error::Memory {
        category: None,
        what: "token ids can not be read back, so they are not communicated".into(),
    }
}
