//! Linear maps, and column sums.

use fsdp_core::Error;
use fsdp_core::model::ParamId;

use super::activation;
use super::dequantize;
use super::describe::{Description, Role};
use crate::graph::{Backward, Builder, Call, Node, Operand, Tensor};
use crate::layer::{self, Layer};
use crate::op::Op;

/// Storage order of a weight matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Orientation {
    /// `outputs x inputs`, as `torch.nn.Linear`.
    OutIn,
    /// `inputs x outputs`, as GPT-2's `Conv1D`.
    InOut,
}

/// Sizes of a linear map `y = x W (+ b)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LinearDims {
    /// Rows of `x` (tokens).
    pub rows: usize,
    /// Columns of `x`.
    pub inputs: usize,
    /// Columns of `y`.
    pub outputs: usize,
    /// Elements from one row of `y` to the next, at least `outputs`: `y` may be a block of columns. The last row may
    /// be incomplete: a `y` slice has `(rows - 1) * y_stride + outputs` elements or more.
    pub y_stride: usize,
    /// Storage order of the weight.
    pub orientation: Orientation,
}

impl LinearDims {
    /// Minimum number of elements of a `y` slice.
    pub fn y_len(&self) -> usize {
        self.rows.saturating_sub(1) * self.y_stride + self.outputs
    }
}

/// Operations of linear maps.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "sizes are what they are called")]
pub enum Linear {
    /// `y = x W (+ bias)`; without a bias, the result may be added to `y`.
    Forward { dims: LinearDims, bias: bool },
    /// `dx = dy W^T`.
    BackwardInput { dims: LinearDims },
    /// `dweight = x^T dy`, in the weight's orientation.
    BackwardWeight { dims: LinearDims },
    /// Column sums of `dy`, whose rows start `stride` elements apart: the gradient of a bias.
    ColumnSums { rows: usize, columns: usize, stride: usize },
}

impl Linear {
    pub(super) fn describe(&self) -> Description {
        let x = |dims: &LinearDims| Role::value("x", dims.rows * dims.inputs);
        let weight = |dims: &LinearDims| Role::value("weight", dims.inputs * dims.outputs);
        let strided = |name, dims: &LinearDims| {
            let (stride, outputs) = (dims.y_stride, dims.outputs);
            assert!(stride >= outputs, "rows of {outputs} elements do not lie {stride} apart");
            Role::value(name, dims.y_len()).or_more(dims.rows * outputs)
        };
        match self {
            Linear::Forward { dims, bias } => Description::new("linear")
                .read([x(dims), weight(dims)])
                .read(bias.then(|| Role::value("bias", dims.outputs)))
                .write([if *bias { strided("y", dims) } else { strided("y", dims).adds() }])
                .products(1, [dims.rows, dims.outputs, dims.inputs])
                .flops(if *bias { dims.rows * dims.outputs } else { 0 }),
            Linear::BackwardInput { dims } => Description::new("linear_backward_input")
                .read([strided("dy", dims), weight(dims)])
                .write([Role::value("dx", dims.rows * dims.inputs).adds()])
                .products(1, [dims.rows, dims.inputs, dims.outputs]),
            Linear::BackwardWeight { dims } => Description::new("linear_backward_weight")
                .read([x(dims), strided("dy", dims)])
                .write([Role::gradient("dweight", dims.inputs * dims.outputs).adds()])
                .products(1, [dims.inputs, dims.outputs, dims.rows]),
            Linear::ColumnSums { rows, columns, stride } => Description::new("column_sums")
                .read([Role::value("dy", rows.saturating_sub(1) * stride + columns).or_more(rows * columns)])
                .write([Role::gradient("sums", *columns).adds()])
                .flops(rows * columns),
        }
    }
}

impl Builder<'_> {
    /// `y = x W + b`, plus the contribution of the weight's [`Adapter`](layer::Adapter), if any.
    ///
    /// # Errors
    /// If a width does not fit, or a parameter does not belong to the block.
    pub fn linear(&mut self, x: Tensor, layer: &layer::Linear) -> Result<Tensor, Error> {
        self.linear_columns(x, std::slice::from_ref(layer))
    }

    /// Several linear maps of one input, with outputs side by side in every row (queries, keys and values).
    ///
    /// # Errors
    /// As [`Builder::linear`].
    pub fn linear_columns(&mut self, x: Tensor, layers: &[layer::Linear]) -> Result<Tensor, Error> {
        let params: Vec<ParamId> = layers.iter().flat_map(Layer::params).collect();
        let ((), y) = self.in_kept_dtype(&params, x, |b, x| Ok(((), b.side_by_side(x, layers)?)))?;
        Ok(y)
    }

    fn side_by_side(&mut self, x: Tensor, layers: &[layer::Linear]) -> Result<Tensor, Error> {
        if layers.iter().any(|layer| self.magnitude(layer).is_some()) {
            return self.decomposed_columns(x, layers);
        }
        let y = self.rows(layers.iter().map(|layer| layer.outputs).sum());
        let mut offset = 0;
        let mut calls = Vec::new();
        for layer in layers {
            self.product(&mut calls, x, layer, y, offset)?;
            offset += layer.outputs;
        }
        self.node(calls, None);
        self.adapted(x, layers, y)
    }

    /// Two linear maps of one input (gate and up, for [`Builder::gated`]).
    ///
    /// # Errors
    /// As [`Builder::linear`].
    pub fn linear_pair(
        &mut self,
        x: Tensor,
        first: &layer::Linear,
        second: &layer::Linear,
    ) -> Result<[Tensor; 2], Error> {
        let is_apart = |layer: &layer::Linear| self.magnitude(layer).is_some() || self.is_kept(layer.weight);
        if [first, second].into_iter().any(is_apart) {
            return Ok([self.linear(x, first)?, self.linear(x, second)?]);
        }
        let outputs = [self.rows(first.outputs), self.rows(second.outputs)];
        let mut calls = Vec::new();
        self.product(&mut calls, x, first, outputs[0], 0)?;
        self.product(&mut calls, x, second, outputs[1], 0)?;
        self.node(calls, None);
        let [y, z] = outputs;
        Ok([
            self.adapted(x, std::slice::from_ref(first), y)?,
            self.adapted(x, std::slice::from_ref(second), z)?,
        ])
    }

    /// Adds the contributions of weight adapters to `y`, the outputs of `layers` side by side.
    fn adapted(&mut self, x: Tensor, layers: &[layer::Linear], y: Tensor) -> Result<Tensor, Error> {
        let (mut y, mut offset) = (y, 0);
        for layer in layers {
            if let Some(adapter) = self.adapter(layer.weight) {
                let dropped = self.dropout(x, adapter.dropout);
                y = self.low_rank(dropped, &adapter, y, offset)?;
            }
            offset += layer.outputs;
        }
        Ok(y)
    }

    /// Adds the product with an adapter's matrices to columns of `y`, `offset` elements into the rows.
    pub(super) fn low_rank(
        &mut self,
        x: Tensor,
        adapter: &layer::Adapter,
        y: Tensor,
        offset: usize,
    ) -> Result<Tensor, Error> {
        let low = self.linear(x, &adapter.down)?;
        let low = self.scale(low, adapter.scale);
        self.add_product(low, &adapter.up, y, offset)
    }

    /// Adds a product to columns of `y`, `offset` elements into the rows.
    pub(super) fn add_product(
        &mut self,
        x: Tensor,
        layer: &layer::Linear,
        y: Tensor,
        offset: usize,
    ) -> Result<Tensor, Error> {
        let sum = self.rows(y.width());
        let mut calls = Vec::new();
        self.product(&mut calls, x, layer, sum, offset)?;
        // The last call is the product; another one may decode its weight.
        calls.last_mut().expect("a product is a call").writes[0].1 = true;
        self.node(calls, Some(y));
        Ok(sum)
    }

    /// Adds the calls of a product, whose outputs begin `offset` elements into the rows of `y`.
    pub(super) fn product(
        &mut self,
        calls: &mut Vec<Call>,
        x: Tensor,
        layer: &layer::Linear,
        y: Tensor,
        offset: usize,
    ) -> Result<(), Error> {
        self.check("linear", x, layer.inputs)?;
        let layer::Linear { inputs, outputs, .. } = *layer;
        let (rows, y_stride, orientation) = (self.row_count(), y.width(), self.orientation(layer));
        let dims = LinearDims { rows, inputs, outputs, y_stride, orientation };
        let mut reads = vec![self.whole(x), self.weight(layer, calls)?];
        if let Some(bias) = layer.bias {
            reads.push(self.param(bias)?);
        }
        let op = Op::Linear(Linear::Forward { dims, bias: layer.bias.is_some() });
        calls.push(Call::new(op, reads, [(y.columns(offset, dims.y_len()), false)]));
        Ok(())
    }
}

/// Derives linear maps. An in-place node adds its product to a value, whose gradient is the gradient of the sum.
pub(super) fn derive(b: &mut Backward<'_>, node: &Node, output: usize) {
    let gradient = b.gradients[output];
    derive_products(b, node);
    if let (Some(addend), Some(gradient)) = (node.update, gradient) {
        b.put(addend, gradient);
    }
}

fn derive_products(b: &mut Backward<'_>, node: &Node) {
    let mut gradients = Vec::new();
    for output in node.writes() {
        if gradients.iter().all(|(id, _)| *id != output) {
            gradients.push((output, b.take(output)));
        }
    }
    let dy = |call: &Call| match call.writes[0].0 {
        Operand::Local { id, offset, len } => {
            let (_, gradient) = gradients.iter().find(|(output, _)| *output == id)?;
            gradient.map(|id| Operand::Local { id, offset, len })
        }
        _ => None,
    };
    let mut maps: Vec<Map<'_>> = Vec::new();
    for call in &node.calls {
        if let (Op::Linear(Linear::Forward { dims, .. }), Some(dy)) = (&call.op, dy(call)) {
            maps.push(Map { call, dims, dy });
        }
    }
    let Some(input) = maps.first().and_then(|map| map.call.reads[0].local()) else { return };
    let trains = maps.iter().any(|map| b.target(map.call.reads[1]).is_some());
    // An activation that was not kept is recomputed by its own backward, which first needs the activation's gradient.
    let recomputed_activation =
        b.recomputed(input).filter(|node| matches!(node.op(), Op::Activation(_)) && b.is_read_once(input));
    let recomputed_activation =
        recomputed_activation.filter(|_| trains && b.needs[input] && b.gradients[input].is_none());
    if recomputed_activation.is_some() {
        gradient_of_input(b, node, input, &maps);
    }
    if trains {
        let x = match recomputed_activation {
            Some(node) => activation::derive_recomputing(b, node, input),
            None => b.load(input),
        };
        for Map { call, dims, dy } in &maps {
            let Some(target) = b.target(call.reads[1]) else { continue };
            let op = Op::Linear(Linear::BackwardWeight { dims: **dims });
            b.draft.call(op, vec![b.draft.whole(x), *dy], vec![target]);
        }
    }
    for Map { call, dims, dy } in &maps {
        let Some(target) = call.reads.get(2).and_then(|bias| b.target(*bias)) else { continue };
        column_sums(b, [dims.rows, dims.outputs, dims.y_stride], *dy, target);
    }
    if recomputed_activation.is_none() && b.needs[input] {
        gradient_of_input(b, node, input, &maps);
    }
}

/// A linear map whose output has a gradient.
struct Map<'a> {
    call: &'a Call,
    dims: &'a LinearDims,
    dy: Operand,
}

/// Adds the gradient of the input of linear maps, from all outputs that have a gradient.
fn gradient_of_input(b: &mut Backward<'_>, node: &Node, input: usize, maps: &[Map<'_>]) {
    for Map { call, dims, dy } in maps {
        let weight = dequantize::weight(b, node, call.reads[1]);
        let dx = b.add_to(input);
        let op = Op::Linear(Linear::BackwardInput { dims: **dims });
        b.draft.call(op, vec![*dy, weight], vec![dx]);
    }
}

/// Adds the gradient of a bias.
pub(super) fn column_sums(
    b: &mut Backward<'_>,
    [rows, columns, stride]: [usize; 3],
    dy: Operand,
    target: (Operand, bool),
) {
    b.draft.call(Op::Linear(Linear::ColumnSums { rows, columns, stride }), vec![dy], vec![target]);
}
