//! Elements of the host's own slices, to the device and back, in parts through pinned memory.

use fsdp_core::memory::{Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::host::convert::{convert_from, convert_to};

use super::buffer::CudaBuffer;
use super::full;
use super::memory::{CudaMemory, expect_dtype, expect_float};
use super::staging::PART_BYTES;
use crate::error::DeviceError;

/// Copies to the device; returns when the elements are in pinned memory.
pub(super) fn write(
    memory: &CudaMemory,
    queue: Queue,
    src: HostSlice<'_>,
    mut dst: SliceMut<'_, CudaBuffer>,
) -> Result<(), Error> {
    let dtype = dst.buffer.dtype();
    match src {
        HostSlice::F32(_) | HostSlice::F64(_) => drop(expect_float(dst.buffer)),
        HostSlice::U32(_) => expect_dtype(dst.buffer, DType::U32),
        HostSlice::I64(_) => expect_dtype(dst.buffer, DType::I64),
    }
    for (start, len) in parts(dst.len, dtype) {
        let part = dst.reborrow();
        let range = memory.range_mut(queue, SliceMut::new(part.buffer, part.offset + start, len))?;
        let sent = memory.staging().send(memory.queues(), queue, range, |bytes| {
            convert_to(part_of(&src, start, len), dtype, bytes);
        });
        explained(memory, sent)?;
    }
    Ok(())
}

/// Copies to the host after the queue's earlier work.
pub(super) fn read(
    memory: &CudaMemory,
    queue: Queue,
    src: Slice<'_, CudaBuffer>,
    mut dst: HostSliceMut<'_>,
) -> Result<(), Error> {
    let dtype = src.buffer.dtype();
    match dst {
        HostSliceMut::F32(_) | HostSliceMut::F64(_) => drop(expect_float(src.buffer)),
        HostSliceMut::I64(_) => expect_dtype(src.buffer, DType::I64),
    }
    for (start, len) in parts(src.len, dtype) {
        let range = memory.range(queue, Slice::new(src.buffer, src.offset + start, len))?;
        let received = memory.staging().receive(memory.queues(), queue, range, |bytes| {
            convert_from(dtype, bytes, part_of_mut(&mut dst, start, len));
        });
        explained(memory, received)?;
    }
    Ok(())
}

/// Copies bytes of a whole buffer to the host after the queue's earlier work.
pub(super) fn download(
    memory: &CudaMemory,
    queue: Queue,
    src: &CudaBuffer,
    bytes: &mut [u8],
) -> Result<(), Error> {
    let dtype = src.dtype();
    for (start, len) in parts(src.len(), dtype) {
        let range = memory.range(queue, Slice::new(src, start, len))?;
        let part = &mut bytes[start * dtype.size_bytes()..][..len * dtype.size_bytes()];
        let taken =
            memory.staging().receive(memory.queues(), queue, range, |bytes| part.copy_from_slice(bytes));
        explained(memory, taken)?;
    }
    Ok(())
}

/// Copies bytes of a whole buffer to the device.
pub(super) fn upload(
    memory: &CudaMemory,
    queue: Queue,
    bytes: &[u8],
    dst: &mut CudaBuffer,
) -> Result<(), Error> {
    let dtype = dst.dtype();
    for (start, len) in parts(dst.len(), dtype) {
        let range = memory.range_mut(queue, SliceMut::new(dst, start, len))?;
        let part = &bytes[start * dtype.size_bytes()..][..len * dtype.size_bytes()];
        let sent = memory.staging().send(memory.queues(), queue, range, |bytes| bytes.copy_from_slice(part));
        explained(memory, sent)?;
    }
    Ok(())
}

/// The ring is allocated at its first use, and there may be no room for it.
fn explained(memory: &CudaMemory, moved: Result<(), DeviceError>) -> Result<(), Error> {
    moved.map_err(|error| full::explain(error, Category::HostStaging, Some(&memory.usage())))
}

/// Where parts begin and how long they are.
fn parts(len: usize, dtype: DType) -> impl Iterator<Item = (usize, usize)> {
    let most = PART_BYTES / dtype.size_bytes();
    (0..len).step_by(most).map(move |start| (start, most.min(len - start)))
}

fn part_of<'a>(slice: &HostSlice<'a>, start: usize, len: usize) -> HostSlice<'a> {
    match slice {
        HostSlice::F32(slice) => HostSlice::F32(&slice[start..start + len]),
        HostSlice::F64(slice) => HostSlice::F64(&slice[start..start + len]),
        HostSlice::U32(slice) => HostSlice::U32(&slice[start..start + len]),
        HostSlice::I64(slice) => HostSlice::I64(&slice[start..start + len]),
    }
}

fn part_of_mut<'a>(slice: &'a mut HostSliceMut<'_>, start: usize, len: usize) -> HostSliceMut<'a> {
    match slice {
        HostSliceMut::F32(slice) => HostSliceMut::F32(&mut slice[start..start + len]),
        HostSliceMut::F64(slice) => HostSliceMut::F64(&mut slice[start..start + len]),
        HostSliceMut::I64(slice) => HostSliceMut::I64(&mut slice[start..start + len]),
    }
}
