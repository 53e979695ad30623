//! The loss of logits that are there already, for backends that multiply in another way.

use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_core::{DType, Error};

use super::buffer::HostBuffer;
use super::kernels::head;
use super::memory::HostMemory;
use crate::lengths;

/// The kernels of the head by themselves, for backends that multiply in another way. Logits are of a master dtype
/// (f32 or f64), `vocab` for each target; a loss is 0 where the target is
/// [`IGNORED_TARGET`](crate::backend::IGNORED_TARGET).
impl HostMemory {
    /// The losses (f64) of rows of logits.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn cross_entropy(
        &self,
        vocab: usize,
        logits: Slice<'_, HostBuffer>,
        targets: Slice<'_, HostBuffer>,
        losses: SliceMut<'_, HostBuffer>,
    ) -> Result<(), Error> {
        lengths::expect("logits", logits.len, targets.len * vocab)?;
        lengths::expect("losses of a head", losses.len, targets.len)?;
        let targets = self.elements(targets)?;
        head::check_targets(targets, vocab)?;
        let losses = self.elements_mut(losses)?;
        match logits.buffer.dtype() {
            DType::F64 => {
                head::losses::<f64>(self.workers(), vocab, self.elements(logits)?, targets, losses);
            }
            _ => head::losses::<f32>(self.workers(), vocab, self.elements(logits)?, targets, losses),
        }
        Ok(())
    }

    /// [`HostMemory::cross_entropy`] that leaves the gradient of the sum of losses where the logits were.
    ///
    /// # Errors
    /// As [`HostMemory::cross_entropy`].
    pub fn cross_entropy_backward(
        &self,
        vocab: usize,
        logits: SliceMut<'_, HostBuffer>,
        targets: Slice<'_, HostBuffer>,
        losses: SliceMut<'_, HostBuffer>,
    ) -> Result<(), Error> {
        lengths::expect("logits", logits.len, targets.len * vocab)?;
        lengths::expect("losses of a head", losses.len, targets.len)?;
        let targets = self.elements(targets)?;
        head::check_targets(targets, vocab)?;
        let losses = self.elements_mut(losses)?;
        let workers = self.workers();
        match logits.buffer.dtype() {
            DType::F64 => {
                head::cross_entropy::<f64>(workers, vocab, self.elements_mut(logits)?, targets, losses, true);
            }
            _ => {
                head::cross_entropy::<f32>(workers, vocab, self.elements_mut(logits)?, targets, losses, true)
            }
        }
        Ok(())
    }
}
