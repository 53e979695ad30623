//! Transfers elements between host slices and the device, in parts through pinned memory.

use std::ops::Range;

use fsdp_core::memory::{Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::host::convert::{convert_from, convert_to};

use super::buffer::{CudaBuffer, In, Out};
use super::full;
use super::lock::lock;
use super::memory::{CudaMemory, expect_dtype, expect_float};
use super::staging::PART_BYTES;
use crate::error::DeviceError;

/// Copies to the device; returns once the elements are in pinned memory.
pub(super) fn write(
    memory: &CudaMemory,
    queue: Queue,
    src: HostSlice<'_>,
    dst: Out<'_>,
) -> Result<(), Error> {
    let dtype = dst.buffer.dtype();
    match src {
        HostSlice::F32(_) | HostSlice::F64(_) => drop(expect_float(dst.buffer)),
        HostSlice::U8(_) => expect_dtype(dst.buffer, DType::U8),
        HostSlice::U32(_) => expect_dtype(dst.buffer, DType::U32),
        HostSlice::I64(_) => expect_dtype(dst.buffer, DType::I64),
    }
    send(memory, queue, dst, |part, bytes| convert_to(part_of(&src, part), dtype, bytes))
}

/// Copies to the host after all earlier work on the queue.
pub(super) fn read(
    memory: &CudaMemory,
    queue: Queue,
    src: In<'_>,
    mut dst: HostSliceMut<'_>,
) -> Result<(), Error> {
    let dtype = src.buffer.dtype();
    match dst {
        HostSliceMut::F32(_) | HostSliceMut::F64(_) => drop(expect_float(src.buffer)),
        HostSliceMut::U8(_) => expect_dtype(src.buffer, DType::U8),
        HostSliceMut::U32(_) => expect_dtype(src.buffer, DType::U32),
        HostSliceMut::I64(_) => expect_dtype(src.buffer, DType::I64),
    }
    receive(memory, queue, src, |part, bytes| convert_from(dtype, bytes, part_of_mut(&mut dst, part)))
}

/// Copies the bytes of a whole buffer to the host, after all earlier work on the compute queue.
pub(super) fn download(memory: &CudaMemory, src: &CudaBuffer, bytes: &mut [u8]) -> Result<(), Error> {
    let size = src.dtype().size_bytes();
    receive(memory, Queue::Compute, Slice::whole(src), |part, received| {
        bytes[part.start * size..part.end * size].copy_from_slice(received);
    })
}

/// Copies the bytes of a whole buffer to the device, on the compute queue.
pub(super) fn upload(memory: &CudaMemory, bytes: &[u8], dst: &mut CudaBuffer) -> Result<(), Error> {
    let size = dst.dtype().size_bytes();
    send(memory, Queue::Compute, SliceMut::whole(dst), |part, staged| {
        staged.copy_from_slice(&bytes[part.start * size..part.end * size]);
    })
}

/// Enqueues the copies of a range, part by part: `fill` writes elements, given by index, to pinned memory.
fn send(
    memory: &CudaMemory,
    queue: Queue,
    dst: Out<'_>,
    mut fill: impl FnMut(Range<usize>, &mut [u8]),
) -> Result<(), Error> {
    for part in parts(dst.len, dst.buffer.dtype()) {
        let range = SliceMut::new(&mut *dst.buffer, dst.offset + part.start, part.len());
        let range = memory.range_mut(queue, range)?;
        let result = lock(&memory.staging).send(&memory.queues, queue, range, |bytes| fill(part, bytes));
        map_staging_error(memory, result)?;
    }
    Ok(())
}

/// Performs the copies of a range, part by part, and waits for them: `take` reads elements, given by index, from pinned
/// memory.
fn receive(
    memory: &CudaMemory,
    queue: Queue,
    src: In<'_>,
    mut take: impl FnMut(Range<usize>, &[u8]),
) -> Result<(), Error> {
    for part in parts(src.len, src.buffer.dtype()) {
        let range = memory.range(queue, Slice::new(src.buffer, src.offset + part.start, part.len()))?;
        let result = lock(&memory.staging).receive(&memory.queues, queue, range, |bytes| take(part, bytes));
        map_staging_error(memory, result)?;
    }
    Ok(())
}

/// The ring is allocated on first use, which may fail for lack of memory.
fn map_staging_error(memory: &CudaMemory, result: Result<(), DeviceError>) -> Result<(), Error> {
    result.map_err(|error| full::allocation_error(error, Category::HostStaging, Some(&memory.usage())))
}

/// The index ranges of the parts.
fn parts(len: usize, dtype: DType) -> impl Iterator<Item = Range<usize>> {
    let part_len = PART_BYTES / dtype.size_bytes();
    (0..len).step_by(part_len).map(move |start| start..len.min(start + part_len))
}

fn part_of<'a>(slice: &HostSlice<'a>, part: Range<usize>) -> HostSlice<'a> {
    match slice {
        HostSlice::F32(slice) => HostSlice::F32(&slice[part]),
        HostSlice::F64(slice) => HostSlice::F64(&slice[part]),
        HostSlice::U8(slice) => HostSlice::U8(&slice[part]),
        HostSlice::U32(slice) => HostSlice::U32(&slice[part]),
        HostSlice::I64(slice) => HostSlice::I64(&slice[part]),
    }
}

fn part_of_mut<'a>(slice: &'a mut HostSliceMut<'_>, part: Range<usize>) -> HostSliceMut<'a> {
    match slice {
        HostSliceMut::F32(slice) => HostSliceMut::F32(&mut slice[part]),
        HostSliceMut::F64(slice) => HostSliceMut::F64(&mut slice[part]),
        HostSliceMut::U8(slice) => HostSliceMut::U8(&mut slice[part]),
        HostSliceMut::U32(slice) => HostSliceMut::U32(&mut slice[part]),
        HostSliceMut::I64(slice) => HostSliceMut::I64(&mut slice[part]),
    }
}
