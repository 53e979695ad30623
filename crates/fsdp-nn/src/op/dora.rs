//! Weights in a direction and lengths (DoRA: Liu et al., 2024): an adapter gives every row of a weight its direction, and a
//! trained magnitude is its length.
//!
//! Gradients treat the length that a row has with its adapter as a constant (section 4.3 of the paper).

use fsdp_core::Error;
use fsdp_core::memory::Category;
use fsdp_core::model::ParamId;

use super::describe::{Description, Role};
use crate::graph::{Backward, Builder, Call, Decl, Node, Operand, Tensor};
use crate::layer::{self, Adapter};
use crate::op::{Op, Orientation};

/// Sizes of an adapted weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptedDims {
    /// Columns of `x`.
    pub inputs: usize,
    /// Columns of `y`.
    pub outputs: usize,
    /// Rows of `A` (`rank x inputs`) and columns of `B` (`outputs x rank`).
    pub rank: usize,
    /// Factor of `B A`.
    pub scale: f64,
    /// Storage order of the weight.
    pub orientation: Orientation,
}

/// Operations of DoRA.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "sizes are what they are called")]
pub enum Dora {
    /// The length of every row of `W + scale B A` (`outputs x inputs`), rounded to the dtype of the weight as in PEFT, so that
    /// magnitudes that are these lengths change nothing.
    Norms { dims: AdaptedDims },
    /// `y = x * magnitude / norms`, plus a bias if `bias`, for every row of `x`.
    Rescale { rows: usize, width: usize, bias: bool },
    /// Backward of [`Dora::Rescale`]: turns `dy` into the gradient of `x`, in place. That of the magnitude is the column
    /// sums of `dy * x`, divided by the norms.
    RescaleBackward { rows: usize, width: usize },
}

impl Dora {
    pub(super) fn describe(&self) -> Description {
        let value = Role::value;
        match *self {
            Dora::Norms { dims: AdaptedDims { inputs, outputs, rank, scale, .. } } => {
                Description::new("dora_norms")
                    .read([value("weight", inputs * outputs), value("down", rank * inputs)])
                    .read([value("up", outputs * rank)])
                    .write([value("norms", outputs)])
                    .constant(scale)
                    .products(1, [outputs, inputs, rank])
                    .flops(4 * inputs * outputs)
            }
            Dora::Rescale { rows, width, bias } => Description::new("rescale")
                .read([value("x", rows * width), value("magnitude", width), value("norms", width)])
                .read(bias.then(|| value("bias", width)))
                .write([value("y", rows * width)])
                .flops((1 + usize::from(bias)) * rows * width)
                .recomputed(),
            Dora::RescaleBackward { rows, width } => Description::new("rescale_backward")
                .read([value("x", rows * width), value("magnitude", width), value("norms", width)])
                .write([value("dy", rows * width).updated(), Role::gradient("dmagnitude", width).adds()])
                .flops(3 * rows * width),
        }
    }

    pub(super) fn derive(&self, b: &mut Backward<'_>, node: &Node, output: usize) {
        let Dora::Rescale { rows, width, .. } = *self else {
            unreachable!("{} prepares a product, or is of backward", self.describe().name)
        };
        let [x, magnitude, norms] = [0, 1, 2].map(|index| node.main().reads[index]);
        let input = x.local().expect("values are rescaled");
        let Some(gradient) = b.take_in_place(input, output) else { return };
        let target = b.target(magnitude).expect("magnitudes are trained");
        let writes = vec![(b.draft.whole(gradient), false), target];
        b.draft.call(Op::Dora(Dora::RescaleBackward { rows, width }), vec![x, magnitude, norms], writes);
        b.put(input, gradient);
    }
}

impl Builder<'_> {
    /// The adapter and the magnitude of a linear map, if it has both.
    pub(super) fn magnitude(&self, layer: &layer::Linear) -> Option<(Adapter, ParamId)> {
        let adapter = self.adapter(layer.weight)?;
        Some((adapter, adapter.magnitude?))
    }

    /// As [`Builder::linear_columns`], each map by itself: what is rescaled is kept apart.
    pub(super) fn decomposed_columns(
        &mut self,
        x: Tensor,
        layers: &[layer::Linear],
    ) -> Result<Tensor, Error> {
        if let [layer] = layers
            && let Some(magnitude) = self.magnitude(layer)
        {
            return self.decomposed(x, layer, magnitude);
        }
        let parts: Vec<Tensor> =
            layers.iter().map(|layer| self.linear(x, layer)).collect::<Result<_, _>>()?;
        Ok(self.concat(&parts))
    }

    /// A linear map with an adapter and a magnitude: `y = (W + scale B A) x * magnitude / norms + b`.
    ///
    /// Dropout is applied to the input of the rescaled part. As in PEFT, `W` sees what was dropped as it would without an
    /// adapter, so dropout of rate `p` adds `W (x - dropout(x))`.
    fn decomposed(
        &mut self,
        x: Tensor,
        layer: &layer::Linear,
        (adapter, magnitude): (Adapter, ParamId),
    ) -> Result<Tensor, Error> {
        let weight = layer::Linear { bias: None, ..*layer };
        let seen = self.dropout(x, adapter.dropout);
        let product = self.rows(layer.outputs);
        let mut calls = Vec::new();
        self.product(&mut calls, seen, &weight, product, 0)?;
        // In one node with the product, which decodes a quantized weight for both.
        let norms = self.norms(&mut calls, layer, &adapter)?;
        self.node(calls, None);
        let product = self.low_rank(seen, &adapter, product, 0)?;
        let mut reads = vec![self.whole(product), self.param(magnitude)?, norms];
        if let Some(bias) = layer.bias {
            reads.push(self.param(bias)?);
        }
        let y = self.rows(layer.outputs);
        let bias = layer.bias.is_some();
        let op = Op::Dora(Dora::Rescale { rows: self.row_count(), width: layer.outputs, bias });
        self.node(vec![Call::new(op, reads, [(self.whole(y), false)])], None);
        if seen == x {
            return Ok(y);
        }
        let negative = self.scale(seen, -1.0);
        let dropped = self.add(x, negative)?;
        self.add_product(dropped, &weight, y, 0)
    }

    /// Adds the call that computes norms before the product of a node.
    fn norms(
        &mut self,
        calls: &mut Vec<Call>,
        layer: &layer::Linear,
        adapter: &Adapter,
    ) -> Result<Operand, Error> {
        let layer::Linear { inputs, outputs, .. } = *layer;
        let (product, orientation) = (calls.len() - 1, self.orientation(layer));
        let reads =
            vec![calls[product].reads[1], self.param(adapter.down.weight)?, self.param(adapter.up.weight)?];
        let dtype = self.dtype();
        let norms = self.declare(Decl { rows: 1, width: outputs, dtype, category: Category::Workspace });
        let rank = adapter.down.outputs;
        let dims = AdaptedDims { inputs, outputs, rank, scale: adapter.scale, orientation };
        calls.insert(product, Call::new(Op::Dora(Dora::Norms { dims }), reads, [(norms, false)]));
        Ok(norms)
    }
}
