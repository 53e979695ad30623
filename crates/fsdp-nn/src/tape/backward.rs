//! The backward side of a tape: a recording is walked from its end, and given up on the way.

use fsdp_core::Error;
use fsdp_core::Queue;
use fsdp_core::memory::{Buffer, Category, Slice, SliceMut};
use fsdp_core::program::Gradients;

use super::forward::Scope;
use super::tensor::Value;
use crate::backend::Backend;

/// An operation that was recorded. Implement it for an operation of your own and hand it to
/// [`Tape::record`](super::Tape::record).
pub trait Node<M: Backend>: Send {
    /// Takes the gradient of its output, writes those of its parameters and passes on those of its inputs.
    ///
    /// # Errors
    /// Those of the memory.
    fn backward(self: Box<Self>, walk: &mut Backward<'_, M>) -> Result<(), Error>;
}

/// What forward of one block left for backward.
pub struct Recording<M: Backend> {
    nodes: Vec<Box<dyn Node<M>>>,
    values: usize,
    output: Value,
}

impl<M: Backend> Recording<M> {
    pub(super) fn new(nodes: Vec<Box<dyn Node<M>>>, values: usize, output: Value) -> Self {
        Self { nodes, values, output }
    }

    /// Whether backward has anything to do: the output has a gradient.
    pub fn leads_back(&self) -> bool {
        self.output.needs_gradient
    }

    /// Walks back from the gradient of the output; returns that of the block's input if it has one.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn backward(
        self,
        scope: Scope<'_, M>,
        gradients: &mut Gradients<M::Buffer>,
        output_gradient: M::Buffer,
    ) -> Result<Option<M::Buffer>, Error> {
        if !self.leads_back() {
            return Ok(None);
        }
        let mut values = Vec::new();
        values.resize_with(self.values, || None);
        values[self.output.index] =
            Some(Gradient { buffer: output_gradient, category: Category::Activation });
        let mut walk = Backward { scope, gradients, values };
        for node in self.nodes.into_iter().rev() {
            node.backward(&mut walk)?;
        }
        Ok(walk.values.swap_remove(INPUT).map(|gradient| gradient.buffer))
    }
}

/// Index of the block's input among the values of a tape, whether it has one or not.
pub(super) const INPUT: usize = 0;

/// The gradient of a value so far.
pub struct Gradient<B> {
    /// Its elements.
    pub buffer: B,
    /// What the buffer is counted as.
    pub category: Category,
}

/// One walk back through a recording.
pub struct Backward<'a, M: Backend> {
    /// What the operations read.
    pub scope: Scope<'a, M>,
    /// Where the gradients of parameters go.
    pub gradients: &'a mut Gradients<M::Buffer>,
    values: Vec<Option<Gradient<M::Buffer>>>,
}

impl<M: Backend> Backward<'_, M> {
    /// The complete gradient of a value, or `None` when nothing that counts depends on it.
    pub fn take(&mut self, value: Value) -> Option<M::Buffer> {
        self.take_gradient(value).map(|gradient| gradient.buffer)
    }

    /// Whether nothing has contributed to the gradient of a value yet.
    pub fn is_untouched(&self, value: Value) -> bool {
        self.values[value.index].is_none()
    }

    /// As [`Backward::take`], for an operation that passes the gradient on as it is, by [`Backward::put`].
    pub fn take_gradient(&mut self, value: Value) -> Option<Gradient<M::Buffer>> {
        self.values[value.index].take()
    }

    /// As [`Backward::take`], for an operation that turns the gradient into that of `input` in place and then
    /// calls [`Backward::put`].
    ///
    /// # Errors
    /// Those of the memory.
    pub fn take_for(&mut self, output: Value, input: Value) -> Result<Option<Gradient<M::Buffer>>, Error> {
        match self.values[output.index].take() {
            None => Ok(None),
            Some(gradient) => Ok(Some(self.own(input, self.travel(input, gradient)?)?)),
        }
    }

    /// Passes a complete contribution to the gradient of `input` on to it.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn put(&mut self, input: Value, gradient: Gradient<M::Buffer>) -> Result<(), Error> {
        if !input.needs_gradient {
            return Ok(());
        }
        let total = match self.values[input.index].take() {
            None => self.travel(input, gradient)?,
            Some(so_far) => {
                let mut total = self.own(input, so_far)?;
                let (from, to) = (Slice::whole(&gradient.buffer), SliceMut::whole(&mut total.buffer));
                self.scope.memory.accumulate(Queue::Compute, from, to)?;
                total
            }
        };
        self.values[input.index] = Some(total);
        Ok(())
    }

    /// Lets `write` compute the gradient of an input, which it adds to the target if told so, and overwrites
    /// otherwise. A gradient that nobody wants is written to scratch: only for kernels that can not do without.
    ///
    /// # Errors
    /// Those of `write` and of the memory.
    pub fn add_with(
        &mut self,
        input: Value,
        len: usize,
        write: impl FnOnce(&mut Self, SliceMut<'_, M::Buffer>, bool) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if !input.needs_gradient {
            let mut scratch = self.scope.allocate(Category::Workspace, len)?;
            return write(self, SliceMut::whole(&mut scratch), false);
        }
        let (mut gradient, accumulate) = match self.values[input.index].take() {
            Some(so_far) => (self.own(input, so_far)?, true),
            None => {
                let category = category(input);
                (Gradient { buffer: self.scope.allocate(category, len)?, category }, false)
            }
        };
        write(self, SliceMut::whole(&mut gradient.buffer), accumulate)?;
        self.values[input.index] = Some(gradient);
        Ok(())
    }

    /// As [`Backward::add_with`], for a `write` that can only overwrite.
    ///
    /// # Errors
    /// Those of `write` and of the memory.
    pub fn write_with(
        &mut self,
        input: Value,
        len: usize,
        write: impl FnOnce(&mut Self, SliceMut<'_, M::Buffer>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if !input.needs_gradient {
            return Ok(());
        }
        let is_first = self.values[input.index].is_none();
        let category = if is_first { category(input) } else { Category::Workspace };
        let mut buffer = self.scope.allocate(category, len)?;
        write(self, SliceMut::whole(&mut buffer))?;
        self.put(input, Gradient { buffer, category })
    }

    /// Passes the gradient of `output` on to several inputs, which then share its storage.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn pass(&mut self, output: Value, inputs: &[Value]) -> Result<(), Error> {
        let Some(gradient) = self.values[output.index].take() else { return Ok(()) };
        for &input in inputs {
            let shared = Gradient { buffer: gradient.buffer.clone(), category: gradient.category };
            self.put(input, shared)?;
        }
        Ok(())
    }

    /// The same gradient in storage that nobody else reads.
    fn own(&self, input: Value, gradient: Gradient<M::Buffer>) -> Result<Gradient<M::Buffer>, Error> {
        if gradient.buffer.is_exclusive() {
            return Ok(gradient);
        }
        self.copy(category(input), &gradient.buffer)
    }

    /// The same gradient, in storage that may leave the block if it is that of the block's input.
    fn travel(&self, input: Value, gradient: Gradient<M::Buffer>) -> Result<Gradient<M::Buffer>, Error> {
        match (category(input), gradient.category) {
            (Category::Activation, Category::Workspace) => self.copy(Category::Activation, &gradient.buffer),
            _ => Ok(gradient),
        }
    }

    fn copy(&self, category: Category, from: &M::Buffer) -> Result<Gradient<M::Buffer>, Error> {
        let mut buffer = self.scope.memory.allocate(category, from.dtype(), from.len())?;
        self.scope.memory.copy(Queue::Compute, Slice::whole(from), SliceMut::whole(&mut buffer))?;
        Ok(Gradient { buffer, category })
    }
}

/// The gradient of a block's input travels on to the block before it.
fn category(value: Value) -> Category {
    if value.index == INPUT { Category::Activation } else { Category::Workspace }
}
