//! `cuda`: libtorch over the memory of one GPU, on its compute stream, with our kernels.

use fsdp_core::memory::{Slice, SliceMut};
use fsdp_core::{Error, Queue};

use super::settings::enter_stream;
use super::storage::{TorchStorage, sealed};
use crate::device::{CudaBuffer, CudaMemory, DeviceMemory};
use crate::fused::FusedOps;

impl sealed::Sealed for CudaMemory {}

impl TorchStorage for CudaMemory {
    fn device(&self) -> tch::Device {
        tch::Device::Cuda(CudaMemory::device(self))
    }

    fn address(&self, slice: Slice<'_, CudaBuffer>) -> Result<*const u8, Error> {
        Ok(self.pointer(slice)? as *const u8)
    }

    fn address_mut(&self, slice: SliceMut<'_, CudaBuffer>) -> Result<*mut u8, Error> {
        Ok(self.pointer_mut(slice)? as *mut u8)
    }

    fn enter(&self) -> Result<(), Error> {
        self.bind()?;
        enter_stream(CudaMemory::device(self), self.stream(Queue::Compute))
    }

    fn fused(&self) -> Option<&dyn FusedOps<CudaBuffer>> {
        Some(self)
    }
}
