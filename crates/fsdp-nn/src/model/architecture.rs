//! The trait that a model implements.

use fsdp_core::Error;
use fsdp_core::model::BlockId;

use crate::backend::Backend;
use crate::layer::{Description, Head};
use crate::tape::{Tape, Tensor};

/// A language model: its description, and the forward computation of each block on a tape.
///
/// The first block turns tokens into rows, the last one turns rows into what the head reads; the head and
/// the loss follow by themselves, and so does backward. A block may read the parameters that the
/// description lists for it, no others.
pub trait Architecture: Send + Sync + 'static {
    /// Parameters, modules and blocks, and how parameters start.
    fn description(&self) -> &Description;

    /// The output head; its weight belongs to the parameters of the last block.
    fn head(&self) -> Head;

    /// The longest sequence that the model can take, if there is a limit.
    fn positions_max(&self) -> Option<usize> {
        None
    }

    /// The first block.
    ///
    /// # Errors
    /// Those of the operations.
    fn first<M: Backend>(&self, tape: &mut Tape<'_, M>) -> Result<Tensor<M>, Error>;

    /// A block that is neither first nor last.
    ///
    /// # Errors
    /// Those of the operations.
    fn middle<M: Backend>(
        &self,
        block: BlockId,
        tape: &mut Tape<'_, M>,
        x: Tensor<M>,
    ) -> Result<Tensor<M>, Error>;

    /// The last block, up to what the head reads.
    ///
    /// # Errors
    /// Those of the operations.
    fn last<M: Backend>(&self, tape: &mut Tape<'_, M>, x: Tensor<M>) -> Result<Tensor<M>, Error>;
}
