//! `torch-cpu`: libtorch over [`HostMemory`], with the host's kernels wherever ATen has no fused one.
//!
//! ATen's compositions of elementwise operations convert bf16 operands and create temporaries at every step, and its
//! blocked attention multiplies through MKL, which is slow on non-Intel CPUs. The host's kernels pass over the operands
//! once.

use fsdp_core::{Error, Queue};
use fsdp_nn::HostMemory;

use super::storage::{In, Out, TorchStorage, sealed};

impl sealed::Sealed for HostMemory {}

impl TorchStorage for HostMemory {
    fn device(&self) -> tch::Device {
        tch::Device::Cpu
    }

    fn address(&self, _queue: Queue, slice: In<'_, Self>) -> Result<*const u8, Error> {
        HostMemory::address(self, slice)
    }

    fn address_mut(&self, _queue: Queue, slice: Out<'_, Self>) -> Result<*mut u8, Error> {
        HostMemory::address_mut(self, slice)
    }

    fn enter(&self, _queue: Queue) -> Result<(), Error> {
        Ok(())
    }
}
