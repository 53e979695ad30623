//! Linear maps: one, or several of the same input.

use fsdp_core::Error;
use fsdp_core::memory::{Buffer, Category, Slice, SliceMut};

use crate::backend::{Backend, LinearDims};
use crate::conformance::Calls;
use crate::layer::Linear;
use crate::tape::products::Origin;
use crate::tape::{Backward, Node, Saved, Tape, Tensor, Value};

/// One map's sizes, and where its output lies.
#[derive(Clone, Copy, Debug)]
struct Part {
    layer: Linear,
    dims: LinearDims,
    /// Which of the node's outputs.
    output: usize,
    offset: usize,
}

impl Part {
    fn new(layer: Linear, rows: usize, y_stride: usize, output: usize, offset: usize) -> Self {
        let Linear { inputs, outputs, orientation, .. } = layer;
        let dims = LinearDims { rows, inputs, outputs, y_stride, orientation };
        Self { layer, dims, output, offset }
    }

    fn len(&self) -> usize {
        (self.dims.rows - 1) * self.dims.y_stride + self.dims.outputs
    }

    fn of<'a, B: Buffer>(&self, packed: &'a B) -> Slice<'a, B> {
        Slice::new(packed, self.offset, self.len())
    }
}

impl<M: Backend> Tape<'_, M> {
    /// `y = x W + b`.
    ///
    /// # Errors
    /// A width that does not fit, a parameter that is not there, or those of the memory.
    pub fn linear(&mut self, x: Tensor<M>, layer: &Linear) -> Result<Tensor<M>, Error> {
        self.linear_columns(x, std::slice::from_ref(layer))
    }

    /// Several linear maps of one input, side by side in every row (queries, keys and values).
    ///
    /// # Errors
    /// As [`Tape::linear`].
    pub fn linear_columns(&mut self, x: Tensor<M>, layers: &[Linear]) -> Result<Tensor<M>, Error> {
        let width = layers.iter().map(|layer| layer.outputs).sum();
        let mut before = 0;
        let part = |layer: &Linear| {
            before += layer.outputs;
            Part::new(*layer, x.rows(), width, 0, before - layer.outputs)
        };
        let parts = layers.iter().map(part).collect();
        let [y] = self.project(x, parts, [width])?;
        Ok(y)
    }

    /// Two linear maps of one input (gate and up, for [`Tape::swiglu`]).
    ///
    /// # Errors
    /// As [`Tape::linear`].
    pub fn linear_pair(
        &mut self,
        x: Tensor<M>,
        first: &Linear,
        second: &Linear,
    ) -> Result<[Tensor<M>; 2], Error> {
        let part = |layer: &Linear, output| Part::new(*layer, x.rows(), layer.outputs, output, 0);
        let parts = vec![part(first, 0), part(second, 1)];
        self.project(x, parts, [first.outputs, second.outputs])
    }

    fn project<const N: usize>(
        &mut self,
        x: Tensor<M>,
        parts: Vec<Part>,
        widths: [usize; N],
    ) -> Result<[Tensor<M>; N], Error> {
        let rows = x.rows();
        for part in &parts {
            self.check("linear", &x, part.layer.inputs)?;
        }
        let buffers = match self.products.next() {
            Origin::Computed => Some(self.multiply(&x, &parts, &widths)?),
            Origin::Kept(buffers) => Some(buffers),
            Origin::Unread => None,
        };
        let mark = buffers.as_ref().and_then(|buffers| self.products.note(buffers));
        let trains_weight = parts.iter().any(|part| self.scope.is_trained(part.layer.weight));
        let mut biases = parts.iter().filter_map(|part| part.layer.bias);
        let trains = trains_weight || biases.any(|id| self.scope.is_trained(id));
        let input = x.value();
        let outputs = widths.map(|_| self.value(input.needs_gradient || trains));
        if outputs[0].needs_gradient {
            let saved = trains_weight.then(|| x.into_saved());
            self.record(LinearNode { input, outputs: outputs.to_vec(), saved, parts });
        }
        let mut buffers = buffers.map(Vec::into_iter);
        Ok(std::array::from_fn(|i| match &mut buffers {
            None => Tensor::without_contents(rows, outputs[i], widths[i]),
            Some(buffers) => {
                let buffer = buffers.next().expect("one buffer was made per output");
                Tensor::new(buffer, outputs[i], widths[i]).with_marks(mark.iter().cloned().collect())
            }
        }))
    }

    /// The products of `x` with all parts, one buffer per output.
    fn multiply(&self, x: &Tensor<M>, parts: &[Part], widths: &[usize]) -> Result<Vec<M::Buffer>, Error> {
        let allocate = |width| self.scope.allocate(Category::Activation, x.rows() * width);
        let mut buffers = widths.iter().map(allocate).collect::<Result<Vec<_>, _>>()?;
        for part in parts {
            let y = SliceMut::new(&mut buffers[part.output], part.offset, part.len());
            let weight = self.scope.param(part.layer.weight)?;
            let bias = part.layer.bias.map(|id| self.scope.param(id)).transpose()?;
            self.scope.memory.linear(part.dims, x.slice(), weight, bias, y)?;
        }
        Ok(buffers)
    }
}

struct LinearNode<M: Backend> {
    input: Value,
    outputs: Vec<Value>,
    saved: Option<Saved<M>>,
    parts: Vec<Part>,
}

impl<M: Backend> Node<M> for LinearNode<M> {
    fn backward(self: Box<Self>, walk: &mut Backward<'_, M>) -> Result<(), Error> {
        let Self { input, outputs, saved, parts } = *self;
        let dys: Vec<Option<M::Buffer>> = outputs.into_iter().map(|output| walk.take(output)).collect();
        let used = || parts.iter().filter_map(|part| Some((part, part.of(dys[part.output].as_ref()?))));
        if used().next().is_none() {
            return Ok(());
        }
        // An activation that was not kept comes back from its own backward, which needs the gradient of the input first.
        let again = saved.as_ref().and_then(Saved::backward_again);
        let again = again.filter(|_| input.needs_gradient && walk.is_untouched(input));
        if again.is_some() {
            backward_input(walk, input, used())?;
        }
        if let Some(saved) = &saved {
            let x = match (again, again.and_then(|_| walk.take(input))) {
                (Some(again), Some(gradient)) => again.backward_again(walk, gradient)?,
                _ => saved.load(&walk.scope)?,
            };
            for (part, dy) in used() {
                if let Some(target) = walk.gradients.target(part.layer.weight) {
                    walk.scope.memory.linear_backward_weight(part.dims, Slice::whole(&x), dy, target)?;
                }
            }
        }
        for (part, dy) in used() {
            if let Some(target) = part.layer.bias.and_then(|id| walk.gradients.target(id)) {
                walk.scope.memory.linear_backward_bias(part.dims, dy, target)?;
            }
        }
        if again.is_none() && input.needs_gradient {
            backward_input(walk, input, used())?;
        }
        Ok(())
    }
}

/// The gradient of the input, from those of all outputs that have one.
fn backward_input<'a, M: Backend>(
    walk: &mut Backward<'_, M>,
    input: Value,
    used: impl Iterator<Item = (&'a Part, Slice<'a, M::Buffer>)>,
) -> Result<(), Error>
where
    M::Buffer: 'a,
{
    for (part, dy) in used {
        walk.add_with(input, part.dims.rows * part.dims.inputs, |walk, dx, accumulate| {
            let weight = walk.scope.param(part.layer.weight)?;
            walk.scope.memory.linear_backward_input(part.dims, dy, weight, dx, accumulate)
        })?;
    }
    Ok(())
}
