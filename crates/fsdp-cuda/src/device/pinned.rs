//! Pinned memory as storage of the host's buffers.

use std::sync::Arc;

use fsdp_core::Error;
use fsdp_core::memory::Category;
use fsdp_nn::accounting::Account;
use fsdp_nn::host::{HostBlock, HostBlocks};

use super::full;
use crate::ffi::driver::{Gpu, PinnedBlock};

/// Pinned blocks, asked of the driver one by one.
#[derive(Debug)]
pub(super) struct PinnedBlocks {
    gpu: Arc<Gpu>,
    /// Of the rank whose buffers lie in them.
    account: Arc<Account>,
}

impl PinnedBlocks {
    pub(super) fn new(gpu: &Arc<Gpu>, account: &Arc<Account>) -> Self {
        Self { gpu: Arc::clone(gpu), account: Arc::clone(account) }
    }
}

impl HostBlocks for PinnedBlocks {
    fn allocate(&self, category: Category, bytes: usize) -> Result<Box<dyn HostBlock>, Error> {
        match self.gpu.allocate_pinned(bytes) {
            Ok(block) => Ok(Box::new(block)),
            Err(error) => Err(full::explain(error, category, Some(&self.account.usage()))),
        }
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
