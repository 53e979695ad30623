//! Buffers as the host's kernels take them, for work that is done on the host.
//!
//! A buffer in pinned memory is taken out of its handle as it is, and put back afterwards; one on the device is
//! copied, and copied back when it was to be written.

use fsdp_core::memory::{Buffer, Category, Memory, Slice, SliceMut};
use fsdp_core::{Error, Queue};
use fsdp_nn::HostBuffer;

use super::buffer::{CudaBuffer, Place};
use super::memory::CudaMemory;
use super::transfer::{download, upload};

/// Takes a buffer that is to be written, after the compute queue's work so far.
pub(crate) fn take(memory: &CudaMemory, from: &mut CudaBuffer) -> Result<HostBuffer, Error> {
    memory.synchronize(Queue::Compute)?;
    if let Place::Host(pinned) = &mut from.0 {
        let empty = memory.mirror().allocate(Category::Workspace, pinned.dtype(), 0)?;
        return Ok(std::mem::replace(pinned, empty));
    }
    copy_of(memory, from)
}

/// Puts back what [`take`] gave.
pub(crate) fn put_back(memory: &CudaMemory, buffer: HostBuffer, to: &mut CudaBuffer) -> Result<(), Error> {
    if let Place::Host(empty) = &mut to.0 {
        *empty = buffer;
        return Ok(());
    }
    upload(memory, memory.mirror().bytes(Slice::whole(&buffer))?, to)
}

/// A readable buffer for the host's kernels, after the compute queue's work so far.
pub(crate) fn readable(memory: &CudaMemory, from: &CudaBuffer) -> Result<HostBuffer, Error> {
    memory.synchronize(Queue::Compute)?;
    match from.on_host() {
        Some(pinned) => Ok(pinned.clone()),
        None => copy_of(memory, from),
    }
}

fn copy_of(memory: &CudaMemory, from: &CudaBuffer) -> Result<HostBuffer, Error> {
    let mirror = memory.mirror();
    let mut copy = mirror.allocate(Category::Workspace, from.dtype(), from.len())?;
    download(memory, from, mirror.bytes_mut(SliceMut::whole(&mut copy))?)?;
    Ok(copy)
}
