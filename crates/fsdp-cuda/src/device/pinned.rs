//! Pinned memory as storage of host buffers.

use std::sync::Arc;

use fsdp_core::Error;
use fsdp_core::memory::Category;
use fsdp_nn::accounting::Account;
use fsdp_nn::host::{HostBlock, HostBlocks};

use super::full;
use crate::ffi::driver::Gpu;

/// Allocates each pinned block from the driver.
#[derive(Debug)]
pub(super) struct PinnedBlocks {
    pub(super) gpu: Arc<Gpu>,
    /// The account of the rank that owns the buffers.
    pub(super) account: Arc<Account>,
}

impl HostBlocks for PinnedBlocks {
    fn allocate(&self, category: Category, bytes: usize) -> Result<Box<dyn HostBlock>, Error> {
        match self.gpu.allocate_pinned(bytes) {
            Ok(block) => Ok(Box::new(block)),
            Err(error) => Err(full::allocation_error(error, category, Some(&self.account.usage()))),
        }
    }
}
