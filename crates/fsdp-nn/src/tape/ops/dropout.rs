//! Dropout. The mask comes from counters, so it is never kept.

use fsdp_core::Error;
use fsdp_core::memory::{Category, SliceMut};

use super::attention::Mask;
use crate::backend::Backend;
use crate::conformance::Calls;
use crate::tape::{Backward, Node, Tape, Tensor, Value};

impl<M: Backend> Tape<'_, M> {
    /// Drops elements with probability `p` in training, in place if nobody else reads `x`.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn dropout(&mut self, x: Tensor<M>, p: f64) -> Result<Tensor<M>, Error> {
        let Some(mask) = self.mask(p) else { return Ok(x) };
        let (input, rows, width) = (x.value(), x.rows(), x.width());
        let output = self.value(input.needs_gradient);
        let (buffer, marks) = x.into_parts();
        let y = match buffer {
            None => Tensor::without_contents(rows, output, width),
            Some(buffer) => {
                let mut y = self.scope.writable(Category::Activation, buffer)?;
                self.scope.memory.dropout(mask.dropout(), SliceMut::whole(&mut y))?;
                Tensor::new(y, output, width).with_marks(marks)
            }
        };
        if output.needs_gradient {
            self.record(DropoutNode { input, output, mask });
        }
        Ok(y)
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
