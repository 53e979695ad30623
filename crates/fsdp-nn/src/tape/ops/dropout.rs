//! Dropout. The mask comes from counters, so it is never kept.

use fsdp_core::Error;
use fsdp_core::memory::{Category, SliceMut};

use super::attention::Mask;
use crate::backend::Backend;
use crate::tape::{Backward, Node, Tape, Tensor, Value};

impl<M: Backend> Tape<'_, M> {
    /// Drops elements with probability `p` in training, in place if nobody else reads `x`.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn dropout(&mut self, x: Tensor<M>, p: f64) -> Result<Tensor<M>, Error> {
        let Some(mask) = self.mask(p) else { return Ok(x) };
        let (input, width) = (x.value(), x.width());
        let scope = &self.scope;
        let mut y = scope.writable(Category::Activation, x.into_buffer())?;
        scope.memory.dropout(mask.dropout(), SliceMut::whole(&mut y))?;
        let output = self.value(input.needs_gradient);
        if output.needs_gradient {
            self.record(DropoutNode { input, output, mask });
        }
        Ok(Tensor::new(y, output, width))
    }
}

struct DropoutNode {
    input: Value,
    output: Value,
    mask: Mask,
}

impl<M: Backend> Node<M> for DropoutNode {
    fn backward(self: Box<Self>, walk: &mut Backward<'_, M>) -> Result<(), Error> {
        let Some(mut gradient) = walk.take_for(self.output, self.input)? else { return Ok(()) };
        walk.scope.memory.dropout(self.mask.dropout(), SliceMut::whole(&mut gradient.buffer))?;
        walk.put(self.input, gradient)
    }
}
