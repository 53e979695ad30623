//! `cuda`: libtorch over the memory of a GPU, on its compute queue, with this crate's kernels.

use fsdp_core::memory::{Slice, SliceMut};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::backend::Dropout;

use super::memory::Torch;
use super::storage::{TorchStorage, sealed};
use crate::device::{CudaBuffer, CudaMemory, DeviceMemory, In, Out, StreamHandle};
use crate::ffi::torch_process::enter_stream;

impl sealed::Sealed for CudaMemory {}

impl TorchStorage for CudaMemory {
    fn device(&self) -> tch::Device {
        tch::Device::Cuda(CudaMemory::device(self))
    }

    fn address(&self, queue: Queue, slice: In<'_>) -> Result<*const u8, Error> {
        Ok(self.pointer(queue, slice)? as *const u8)
    }

    fn address_mut(&self, queue: Queue, slice: Out<'_>) -> Result<*mut u8, Error> {
        Ok(self.pointer_mut(queue, slice)? as *mut u8)
    }

    fn enter(&self, queue: Queue) -> Result<(), Error> {
        self.bind()?;
        enter_stream(CudaMemory::device(self), self.stream(queue))
    }

    fn is_on_device(&self, buffer: &CudaBuffer) -> bool {
        !buffer.is_on_host()
    }

    fn dropout_factors(
        &self,
        runs: Dropout<'_>,
        firsts: &[u64],
        dtype: DType,
        run_len: usize,
    ) -> Result<Option<CudaBuffer>, Error> {
        CudaMemory::dropout_factors(self, runs, firsts, dtype, run_len).map(Some)
    }
}

/// NCCL uses the underlying memory directly.
impl<D: TorchStorage + DeviceMemory> DeviceMemory for Torch<D> {
    fn pointer(&self, queue: Queue, slice: Slice<'_, D::Buffer>) -> Result<u64, Error> {
        self.storage().pointer(queue, slice)
    }

    fn pointer_mut(&self, queue: Queue, slice: SliceMut<'_, D::Buffer>) -> Result<u64, Error> {
        self.storage().pointer_mut(queue, slice)
    }

    fn stream(&self, queue: Queue) -> StreamHandle {
        self.storage().stream(queue)
    }

    fn bind(&self) -> Result<(), Error> {
        self.storage().bind()
    }

    fn is_complete(&self, event: &D::Event) -> Result<bool, Error> {
        self.storage().is_complete(event)
    }
}
