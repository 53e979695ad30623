//! Row norms: RMS norm and layer norm.

use fsdp_core::Error;
use fsdp_core::model::ParamId;

use super::describe::{Description, Role};
use super::linear::column_sums;
use crate::graph::{Backward, Builder, Node, Tensor};
use crate::layer::{self, Layer, LayerNorm, RmsNorm};
use crate::op::Op;

/// Operations of norms.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "sizes are what they are called")]
pub enum Norm {
    /// RMS norm of every row: `y = x * rstd * (weight + offset)`.
    Rms { rows: usize, width: usize, eps: f64, offset: f64 },
    /// Backward of [`Norm::Rms`], to the weight too if `weight`.
    RmsBackward { rows: usize, width: usize, offset: f64, weight: bool },
    /// Layer norm of every row: `y = (x - mean) * rstd * weight`, plus a bias if `bias`; `stats` holds mean and rstd,
    /// interleaved.
    Layer { rows: usize, width: usize, eps: f64, bias: bool },
    /// Backward of [`Norm::Layer`] to its input.
    LayerBackwardInput { rows: usize, width: usize },
    /// Column sums of `dy * (x - mean) * rstd`. (The gradient of the bias is [`Linear::ColumnSums`](super::Linear).)
    LayerBackwardWeight { rows: usize, width: usize },
}

impl Norm {
    pub(super) fn describe(&self) -> Description {
        let (Norm::Rms { rows, width, .. }
        | Norm::RmsBackward { rows, width, .. }
        | Norm::Layer { rows, width, .. }
        | Norm::LayerBackwardInput { rows, width }
        | Norm::LayerBackwardWeight { rows, width }) = *self;
        let len = rows * width;
        let (x, weight, dy) = (Role::value("x", len), Role::value("weight", width), Role::value("dy", len));
        let (y, dx) = (Role::value("y", len), Role::value("dx", len).adds());
        let (rstd, stats) = (Role::statistic("rstd", rows), Role::statistic("stats", 2 * rows));
        let dweight = Role::gradient("dweight", width).adds();
        match self {
            Norm::Rms { eps, offset, .. } => Description::new("rms_norm")
                .read([x, weight])
                .write([y, rstd])
                .constant(*eps)
                .constant(*offset)
                .flops(4 * len)
                .recomputed(),
            Norm::RmsBackward { weight: trains, offset, .. } => Description::new("rms_norm_backward")
                .read([x, weight, rstd, dy])
                .write([dx])
                .write(trains.then_some(dweight))
                .constant(*offset)
                .flops((7 + 3 * usize::from(*trains)) * len),
            Norm::Layer { eps, bias, .. } => Description::new("layer_norm")
                .read([x, weight])
                .read(bias.then(|| Role::value("bias", width)))
                .write([y, stats])
                .constant(*eps)
                .flops((6 + usize::from(*bias)) * len)
                .recomputed(),
            Norm::LayerBackwardInput { .. } => Description::new("layer_norm_backward_input")
                .read([x, weight, stats, dy])
                .write([dx])
                .flops(10 * len),
            Norm::LayerBackwardWeight { .. } => Description::new("layer_norm_backward_weight")
                .read([x, stats, dy])
                .write([dweight])
                .flops(4 * len),
        }
    }

    pub(super) fn derive(&self, b: &mut Backward<'_>, node: &Node, output: usize) {
        let Some(dy) = b.take(output) else { return };
        let call = node.main();
        let input = call.reads[0].local().expect("a norm reads a value");
        let x = b.load(input);
        let (x, dy, stats, weight) = (b.draft.whole(x), b.draft.whole(dy), call.writes[1].0, call.reads[1]);
        match *self {
            Norm::Rms { rows, width, offset, .. } => {
                let dx = if b.needs[input] { b.add_to(input) } else { b.scratch(input) };
                let target = b.target(weight);
                let op = Op::Norm(Norm::RmsBackward { rows, width, offset, weight: target.is_some() });
                b.draft.call(op, vec![x, weight, stats, dy], [dx].into_iter().chain(target).collect());
            }
            Norm::Layer { rows, width, .. } => {
                if let Some(target) = b.target(weight) {
                    let op = Op::Norm(Norm::LayerBackwardWeight { rows, width });
                    b.draft.call(op, vec![x, stats, dy], vec![target]);
                }
                if let Some(target) = call.reads.get(2).and_then(|&bias| b.target(bias)) {
                    column_sums(b, [rows, width, width], dy, target);
                }
                if b.needs[input] {
                    let dx = b.add_to(input);
                    let op = Op::Norm(Norm::LayerBackwardInput { rows, width });
                    b.draft.call(op, vec![x, weight, stats, dy], vec![dx]);
                }
            }
            _ => unreachable!("{} is not an operation of forward", self.describe().name),
        }
    }
}

impl Builder<'_> {
    /// Norm of every row.
    ///
    /// # Errors
    /// As [`Builder::linear`].
    pub fn norm(&mut self, x: Tensor, layer: &layer::Norm) -> Result<Tensor, Error> {
        match layer {
            layer::Norm::Rms(norm) => self.rms_norm(x, norm),
            layer::Norm::Layer(norm) => self.layer_norm(x, norm),
        }
    }

    /// RMS norm of every row.
    ///
    /// # Errors
    /// As [`Builder::linear`].
    pub fn rms_norm(&mut self, x: Tensor, layer: &RmsNorm) -> Result<Tensor, Error> {
        self.check("rms_norm", x, layer.width)?;
        self.rms_norm_heads(x, layer)
    }

    /// RMS norm of every head of every row, all with the same weight: of queries and keys before rotation (Qwen 3,
    /// Gemma 3). The device and the derivative treat heads as rows.
    ///
    /// # Errors
    /// If a row is not a whole number of heads, or as [`Builder::linear`].
    pub fn rms_norm_heads(&mut self, x: Tensor, layer: &RmsNorm) -> Result<Tensor, Error> {
        let heads = (x.width() / layer.width.max(1)).max(1);
        self.check("rms_norm_heads", x, heads * layer.width)?;
        let RmsNorm { weight, width, eps, offset } = *layer;
        let op = Norm::Rms { rows: self.row_count() * heads, width, eps, offset };
        self.norm_rows(x, op, &[weight], heads)
    }

    /// Adds a norm with these parameters and `stats` statistics per row.
    fn norm_rows(&mut self, x: Tensor, op: Norm, params: &[ParamId], stats: usize) -> Result<Tensor, Error> {
        let ((), y) = self.in_kept_dtype(params, x, |b, x| {
            let params = params.iter().map(|&id| b.param(id));
            let reads = [Ok(b.whole(x))].into_iter().chain(params).collect::<Result<_, _>>()?;
            Ok(((), b.with_statistics((Op::Norm(op), reads), [x.width(), stats], None, |_| None)))
        })?;
        Ok(y)
    }

    /// Layer norm of every row.
    ///
    /// # Errors
    /// As [`Builder::linear`].
    pub fn layer_norm(&mut self, x: Tensor, layer: &LayerNorm) -> Result<Tensor, Error> {
        self.check("layer_norm", x, layer.width)?;
        let LayerNorm { width, eps, bias, .. } = *layer;
        let op = Norm::Layer { rows: self.row_count(), width, eps, bias: bias.is_some() };
        self.norm_rows(x, op, &layer.params(), 2)
    }
}
