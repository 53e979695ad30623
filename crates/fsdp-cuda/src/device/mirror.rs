//! Provides buffers to the host's kernels, for work done on the host.
//!
//! A buffer in pinned memory is taken out of its handle and put back afterwards; a device buffer is copied, and copied
//! back if it was written.

use fsdp_core::memory::{Buffer, Category, Memory, Slice, SliceMut};
use fsdp_core::{Error, Queue};
use fsdp_nn::HostBuffer;

use super::buffer::{CudaBuffer, Location};
use super::memory::CudaMemory;
use super::transfer::{download, upload};

/// Takes a buffer for writing, after all earlier work on the compute queue.
pub(crate) fn take(memory: &CudaMemory, from: &mut CudaBuffer) -> Result<HostBuffer, Error> {
    memory.synchronize(Queue::Compute)?;
    if let Location::Host(pinned) = &mut from.0 {
        let empty = memory.mirror().allocate(Category::Workspace, pinned.dtype(), 0)?;
        return Ok(std::mem::replace(pinned, empty));
    }
    copy_of(memory, from)
}

/// Puts back a buffer from [`take`].
pub(crate) fn put_back(memory: &CudaMemory, buffer: HostBuffer, to: &mut CudaBuffer) -> Result<(), Error> {
    if let Location::Host(empty) = &mut to.0 {
        *empty = buffer;
        return Ok(());
    }
    upload(memory, memory.mirror().bytes(Slice::whole(&buffer))?, to)
}

/// Returns a readable buffer, after all earlier work on the compute queue.
pub(crate) fn readable(memory: &CudaMemory, from: &CudaBuffer) -> Result<HostBuffer, Error> {
    memory.synchronize(Queue::Compute)?;
    match from.as_host() {
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
