//! Norms. Their outputs are not kept: one pass over the input makes them again.

use std::sync::Arc;

use fsdp_core::Error;
use fsdp_core::memory::{Buffer, Category, Slice, SliceMut};

use crate::backend::Backend;
use crate::conformance::Calls;
use crate::layer::{LayerNorm, RmsNorm};
use crate::tape::{Backward, Node, Recompute, Saved, Scope, Tape, Tensor, Value};

impl<M: Backend> Tape<'_, M> {
    /// Root-mean-square norm of every row.
    ///
    /// # Errors
    /// A width that does not fit, a parameter that is not there, or those of the memory.
    pub fn rms_norm(&mut self, x: Tensor<M>, layer: &RmsNorm) -> Result<Tensor<M>, Error> {
        self.norm("rms_norm", x, Norm::Rms(*layer))
    }

    /// Layer norm of every row.
    ///
    /// # Errors
    /// As [`Tape::rms_norm`].
    pub fn layer_norm(&mut self, x: Tensor<M>, layer: &LayerNorm) -> Result<Tensor<M>, Error> {
        self.norm("layer_norm", x, Norm::Layer(*layer))
    }

    fn norm(&mut self, op: &'static str, x: Tensor<M>, norm: Norm) -> Result<Tensor<M>, Error> {
        let width = norm.width();
        self.check(op, &x, width)?;
        let scope = &self.scope;
        let input = x.value();
        let trains = norm.trains(scope);
        let needs_gradient = input.needs_gradient || trains;
        let output = self.value(needs_gradient);
        let scope = &self.scope;
        let mut y = scope.allocate(Category::Activation, x.rows() * width)?;
        let kept = if output.needs_gradient { Category::Activation } else { Category::Workspace };
        let mut stats = scope.statistics(kept, x.rows() * norm.stats_per_row())?;
        norm.forward(scope, x.slice(), SliceMut::whole(&mut y), SliceMut::whole(&mut stats))?;
        let y = Tensor::new(y, output, width);
        if !output.needs_gradient {
            return Ok(y);
        }
        let again = Arc::new(Normed { norm, x: x.into_saved() });
        self.record(NormNode { input, output, stats, normed: Arc::clone(&again) });
        Ok(y.with_recompute(again))
    }
}

/// Either norm.
#[derive(Clone, Copy)]
enum Norm {
    Rms(RmsNorm),
    Layer(LayerNorm),
}

impl Norm {
    fn width(self) -> usize {
        match self {
            Norm::Rms(layer) => layer.width,
            Norm::Layer(layer) => layer.width,
        }
    }

    fn stats_per_row(self) -> usize {
        match self {
            Norm::Rms(_) => 1,
            Norm::Layer(_) => 2,
        }
    }

    fn trains<M: Backend>(self, scope: &Scope<'_, M>) -> bool {
        match self {
            Norm::Rms(layer) => scope.is_trained(layer.weight),
            Norm::Layer(layer) => scope.is_trained(layer.weight) || scope.is_trained(layer.bias),
        }
    }

    fn forward<M: Backend>(
        self,
        scope: &Scope<'_, M>,
        x: Slice<'_, M::Buffer>,
        y: SliceMut<'_, M::Buffer>,
        stats: SliceMut<'_, M::Buffer>,
    ) -> Result<(), Error> {
        match self {
            Norm::Rms(RmsNorm { weight, width, eps }) => {
                scope.memory.rms_norm(width, eps, x, scope.param(weight)?, y, stats)
            }
            Norm::Layer(LayerNorm { weight, bias, width, eps }) => {
                let (weight, bias) = (scope.param(weight)?, scope.param(bias)?);
                scope.memory.layer_norm(width, eps, x, weight, bias, y, stats)
            }
        }
    }
}

/// The output of a norm, as a way to compute it.
struct Normed<M: Backend> {
    norm: Norm,
    x: Saved<M>,
}

impl<M: Backend> Recompute<M> for Normed<M> {
    fn recompute(&self, scope: &Scope<'_, M>) -> Result<M::Buffer, Error> {
        let x = self.x.load(scope)?;
        let mut y = scope.allocate(Category::Workspace, x.len())?;
        let rows = x.len() / self.norm.width();
        let mut stats = scope.statistics(Category::Workspace, rows * self.norm.stats_per_row())?;
        let (out, stats) = (SliceMut::whole(&mut y), SliceMut::whole(&mut stats));
        self.norm.forward(scope, Slice::whole(&x), out, stats)?;
        Ok(y)
    }
}

struct NormNode<M: Backend> {
    input: Value,
    output: Value,
    stats: M::Buffer,
    normed: Arc<Normed<M>>,
}

impl<M: Backend> Node<M> for NormNode<M> {
    fn backward(self: Box<Self>, walk: &mut Backward<'_, M>) -> Result<(), Error> {
        let Some(dy) = walk.take(self.output) else { return Ok(()) };
        let x = self.normed.x.load(&walk.scope)?;
        let (x, stats, dy) = (Slice::whole(&x), Slice::whole(&self.stats), Slice::whole(&dy));
        match self.normed.norm {
            Norm::Rms(layer) => rms_norm_backward(walk, layer, self.input, x, stats, dy),
            Norm::Layer(layer) => layer_norm_backward(walk, layer, self.input, x, stats, dy),
        }
    }
}

fn rms_norm_backward<M: Backend>(
    walk: &mut Backward<'_, M>,
    RmsNorm { weight, width, eps: _ }: RmsNorm,
    input: Value,
    x: Slice<'_, M::Buffer>,
    rstd: Slice<'_, M::Buffer>,
    dy: Slice<'_, M::Buffer>,
) -> Result<(), Error> {
    walk.add_with(input, x.len, |walk, dx, accumulate| {
        let scale = walk.scope.param(weight)?;
        let target = walk.gradients.target(weight);
        walk.scope.memory.rms_norm_backward(width, x, scale, rstd, dy, dx, accumulate, target)
    })
}

fn layer_norm_backward<M: Backend>(
    walk: &mut Backward<'_, M>,
    LayerNorm { weight, bias, width, eps: _ }: LayerNorm,
    input: Value,
    x: Slice<'_, M::Buffer>,
    stats: Slice<'_, M::Buffer>,
    dy: Slice<'_, M::Buffer>,
) -> Result<(), Error> {
    let memory = walk.scope.memory;
    if let Some(target) = walk.gradients.target(weight) {
        memory.layer_norm_backward_weight(width, x, stats, dy, target)?;
    }
    if let Some(target) = walk.gradients.target(bias) {
        memory.linear_backward_bias(column_sums(width, dy.len), dy, target)?;
    }
    if !input.needs_gradient {
        return Ok(());
    }
    walk.add_with(input, x.len, |walk, dx, accumulate| {
        let scale = walk.scope.param(weight)?;
        memory.layer_norm_backward_input(width, x, scale, stats, dy, dx, accumulate)
    })
}

/// The dimensions under which the backward of a bias sums the columns of `len` elements.
fn column_sums(width: usize, len: usize) -> crate::backend::LinearDims {
    crate::backend::LinearDims {
        rows: len / width,
        inputs: width,
        outputs: width,
        y_stride: width,
        orientation: crate::backend::Orientation::OutIn,
    }
}
