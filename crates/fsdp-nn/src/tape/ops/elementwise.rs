//! Sums and activations, element by element.

use std::sync::Arc;

use fsdp_core::Error;
use fsdp_core::Queue;
use fsdp_core::memory::{Buffer, Category, Slice, SliceMut};

use crate::backend::Backend;
use crate::conformance::Calls;
use crate::tape::{Backward, BackwardAgain, Gradient, Node, Recompute, Saved, Scope, Tape, Tensor, Value};

impl<M: Backend> Tape<'_, M> {
    /// `a + b`, in place of whichever nobody else reads.
    ///
    /// # Errors
    /// Widths that differ, or those of the memory.
    pub fn add(&mut self, a: Tensor<M>, b: Tensor<M>) -> Result<Tensor<M>, Error> {
        self.check("add", &a, b.width())?;
        let (inputs, rows, width) = ([a.value(), b.value()], a.rows(), a.width());
        let output = self.value(inputs.iter().any(|input| input.needs_gradient));
        let ((a, mut marks), (b, more)) = (a.into_parts(), b.into_parts());
        marks.extend(more);
        let sum = match (a, b) {
            (Some(a), Some(b)) => Tensor::new(sum(&self.scope, a, b)?, output, width).with_marks(marks),
            _ => Tensor::without_contents(rows, output, width),
        };
        if output.needs_gradient {
            self.record(AddNode { inputs, output });
        }
        Ok(sum)
    }

    /// `silu(gate) * up`.
    ///
    /// # Errors
    /// Widths that differ, or those of the memory.
    pub fn swiglu(&mut self, gate: Tensor<M>, up: Tensor<M>) -> Result<Tensor<M>, Error> {
        self.check("swiglu", &gate, up.width())?;
        let (inputs, width) = ([gate.value(), up.value()], gate.width());
        let buffer = swiglu(&self.scope, Category::Activation, gate.slice(), up.slice())?;
        let output = self.value(inputs.iter().any(|input| input.needs_gradient));
        let y = Tensor::new(buffer, output, width);
        if !output.needs_gradient {
            return Ok(y);
        }
        let gated = Arc::new(Gated { inputs, gate: gate.into_saved(), up: up.into_saved() });
        self.record(SwiGluNode { output, gated: Arc::clone(&gated) });
        Ok(y.with_recompute(gated))
    }

    /// GELU in the tanh form.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn gelu(&mut self, x: Tensor<M>) -> Result<Tensor<M>, Error> {
        let (input, width) = (x.value(), x.width());
        let buffer = gelu(&self.scope, Category::Activation, x.slice())?;
        let output = self.value(input.needs_gradient);
        let y = Tensor::new(buffer, output, width);
        if !output.needs_gradient {
            return Ok(y);
        }
        let activated = Arc::new(Activated { input, x: x.into_saved() });
        self.record(GeluNode { output, activated: Arc::clone(&activated) });
        Ok(y.with_recompute(activated))
    }
}

/// `a + b`, in place of whichever nobody else reads.
fn sum<M: Backend>(scope: &Scope<'_, M>, a: M::Buffer, b: M::Buffer) -> Result<M::Buffer, Error> {
    let (mut sum, term) = if !b.is_exclusive() && a.is_exclusive() { (a, b) } else { (b, a) };
    if sum.is_exclusive() {
        scope.memory.accumulate(Queue::Compute, Slice::whole(&term), SliceMut::whole(&mut sum))?;
        return Ok(sum);
    }
    let mut fresh = scope.allocate(Category::Activation, sum.len())?;
    scope.memory.add(Slice::whole(&term), Slice::whole(&sum), SliceMut::whole(&mut fresh))?;
    Ok(fresh)
}

struct AddNode {
    inputs: [Value; 2],
    output: Value,
}

impl<M: Backend> Node<M> for AddNode {
    fn backward(self: Box<Self>, walk: &mut Backward<'_, M>) -> Result<(), Error> {
        walk.pass(self.output, &self.inputs)
    }
}

/// The output of swiglu, as a way to compute it.
struct Gated<M: Backend> {
    inputs: [Value; 2],
    gate: Saved<M>,
    up: Saved<M>,
}

impl<M: Backend> Recompute<M> for Gated<M> {
    fn recompute(&self, scope: &Scope<'_, M>) -> Result<M::Buffer, Error> {
        let (gate, up) = (self.gate.load(scope)?, self.up.load(scope)?);
        swiglu(scope, Category::Workspace, Slice::whole(&gate), Slice::whole(&up))
    }

    fn backward_again(&self) -> Option<&dyn BackwardAgain<M>> {
        Some(self)
    }
}

impl<M: Backend> BackwardAgain<M> for Gated<M> {
    fn backward_again(&self, walk: &mut Backward<'_, M>, gradient: M::Buffer) -> Result<M::Buffer, Error> {
        let mut gradient = gradient;
        self.backward(walk, |memory, [gate, up], dgate, dup| {
            memory.swiglu_backward_again(gate, up, SliceMut::whole(&mut gradient), dgate, dup)
        })?;
        Ok(gradient)
    }
}

impl<M: Backend> Gated<M> {
    /// Passes the gradients on that `write` makes.
    fn backward(
        &self,
        walk: &mut Backward<'_, M>,
        write: impl FnOnce(
            &M,
            [Slice<'_, M::Buffer>; 2],
            SliceMut<'_, M::Buffer>,
            SliceMut<'_, M::Buffer>,
        ) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (gate, up) = (self.gate.load(&walk.scope)?, self.up.load(&walk.scope)?);
        let category = Category::Workspace;
        let mut dgate = walk.scope.allocate(category, gate.len())?;
        let mut dup = walk.scope.allocate(category, up.len())?;
        let inputs = [Slice::whole(&gate), Slice::whole(&up)];
        write(walk.scope.memory, inputs, SliceMut::whole(&mut dgate), SliceMut::whole(&mut dup))?;
        walk.put(self.inputs[0], Gradient { buffer: dgate, category })?;
        walk.put(self.inputs[1], Gradient { buffer: dup, category })
    }
}

fn swiglu<M: Backend>(
    scope: &Scope<'_, M>,
    category: Category,
    gate: Slice<'_, M::Buffer>,
    up: Slice<'_, M::Buffer>,
) -> Result<M::Buffer, Error> {
    let mut y = scope.allocate(category, gate.len)?;
    scope.memory.swiglu(gate, up, SliceMut::whole(&mut y))?;
    Ok(y)
}

struct SwiGluNode<M: Backend> {
    output: Value,
    gated: Arc<Gated<M>>,
}

impl<M: Backend> Node<M> for SwiGluNode<M> {
    fn backward(self: Box<Self>, walk: &mut Backward<'_, M>) -> Result<(), Error> {
        let Some(dy) = walk.take(self.output) else { return Ok(()) };
        self.gated.backward(walk, |memory, [gate, up], dgate, dup| {
            memory.swiglu_backward(gate, up, Slice::whole(&dy), dgate, dup)
        })
    }
}

/// The output of GELU, as a way to compute it.
struct Activated<M: Backend> {
    input: Value,
    x: Saved<M>,
}

impl<M: Backend> Recompute<M> for Activated<M> {
    fn recompute(&self, scope: &Scope<'_, M>) -> Result<M::Buffer, Error> {
        let x = self.x.load(scope)?;
        gelu(scope, Category::Workspace, Slice::whole(&x))
    }

    fn backward_again(&self) -> Option<&dyn BackwardAgain<M>> {
        Some(self)
    }
}

impl<M: Backend> BackwardAgain<M> for Activated<M> {
    fn backward_again(&self, walk: &mut Backward<'_, M>, gradient: M::Buffer) -> Result<M::Buffer, Error> {
        let x = self.x.load(&walk.scope)?;
        let mut gradient = gradient;
        walk.write_with(self.input, x.len(), |walk, dx| {
            let dy = SliceMut::whole(&mut gradient);
            walk.scope.memory.gelu_backward_again(Slice::whole(&x), dy, dx)
        })?;
        Ok(gradient)
    }
}

fn gelu<M: Backend>(
    scope: &Scope<'_, M>,
    category: Category,
    x: Slice<'_, M::Buffer>,
) -> Result<M::Buffer, Error> {
    let mut y = scope.allocate(category, x.len)?;
    scope.memory.gelu(x, SliceMut::whole(&mut y))?;
    Ok(y)
}

struct GeluNode<M: Backend> {
    output: Value,
    activated: Arc<Activated<M>>,
}

impl<M: Backend> Node<M> for GeluNode<M> {
    fn backward(self: Box<Self>, walk: &mut Backward<'_, M>) -> Result<(), Error> {
        let Some(dy) = walk.take(self.output) else { return Ok(()) };
        let x = self.activated.x.load(&walk.scope)?;
        walk.write_with(self.activated.input, x.len(), |walk, dx| {
            walk.scope.memory.gelu_backward(Slice::whole(&x), Slice::whole(&dy), dx)
        })
    }
}
