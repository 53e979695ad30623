//! Pinned memory as storage of the host's buffers.

use std::sync::Arc;

use fsdp_core::Error;
use fsdp_nn::host::{HostBlock, HostBlocks};

use crate::ffi::driver::{Gpu, PinnedBlock};

/// Pinned blocks, asked of the driver one by one.
#[derive(Debug)]
pub(super) struct PinnedBlocks(Arc<Gpu>);

impl PinnedBlocks {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Self {
        Self(Arc::clone(gpu))
    }
}

impl HostBlocks for PinnedBlocks {
    fn allocate(&self, bytes: usize) -> Result<Box<dyn HostBlock>, Error> {
        Ok(Box::new(self.0.allocate_pinned(bytes)?))
    }
}

impl HostBlock for PinnedBlock {
    fn bytes(&self) -> &[u8] {
        PinnedBlock::bytes(self)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        PinnedBlock::bytes_mut(self)
    }
}
