//! What a model's code is run against: every operation of a block, once, leaving a graph.

use std::sync::Arc;

use fsdp_core::memory::Category;
use fsdp_core::model::{BlockId, ModelSpec, ParamId};
use fsdp_core::{DType, Error};

use super::{BlockGraph, Call, Decl, Node, Operand};
use crate::error::ModelError;
use crate::layer::{Attention, Embedding, LayerNorm, Linear, RmsNorm, Rope};
use crate::op::{LinearDims, Op};

/// A matrix of rows that an operation makes. It may be used any number of times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    id: usize,
    width: usize,
}

impl Tensor {
    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.width
    }
}

/// Collects the operations of one block: they are its methods.
pub struct Builder<'a> {
    spec: &'a ModelSpec,
    block: BlockId,
    samples: usize,
    seq: usize,
    dtype: DType,
    training: bool,
    values: Vec<Decl>,
    nodes: Vec<Node>,
    sites: u64,
}

impl<'a> Builder<'a> {
    /// For a block over micro-batches of `samples` samples of `seq` tokens; dropout acts in training.
    pub(crate) fn new(
        (spec, block): (&'a ModelSpec, BlockId),
        (samples, seq): (usize, usize),
        dtype: DType,
        training: bool,
    ) -> Self {
        Self { spec, block, samples, seq, dtype, training, values: Vec::new(), nodes: Vec::new(), sites: 0 }
    }

    /// The rows that come from the block before.
    pub(crate) fn input(&mut self, width: usize) -> Tensor {
        self.rows(width)
    }

    /// The block that ends with `output`.
    pub(crate) fn finish(self, input: Option<Tensor>, output: Tensor) -> BlockGraph {
        let input = input.map(|input| input.id);
        BlockGraph { values: self.values, nodes: self.nodes, input, output: output.id }
    }

    /// The block.
    pub fn block(&self) -> BlockId {
        self.block
    }

    /// An error of this block.
    pub fn error(&self, source: ModelError) -> Error {
        Error::Program { block: self.spec.block(self.block).name.clone(), source: Box::new(source) }
    }

    /// `y = x W + b`.
    ///
    /// # Errors
    /// A width that does not fit, or a parameter that is not the block's.
    pub fn linear(&mut self, x: Tensor, layer: &Linear) -> Result<Tensor, Error> {
        self.linear_columns(x, std::slice::from_ref(layer))
    }

    /// Several linear maps of one input, side by side in every row (queries, keys and values).
    ///
    /// # Errors
    /// As [`Builder::linear`].
    pub fn linear_columns(&mut self, x: Tensor, layers: &[Linear]) -> Result<Tensor, Error> {
        let y = self.rows(layers.iter().map(|layer| layer.outputs).sum());
        let mut offset = 0;
        let mut calls = Vec::new();
        for layer in layers {
            calls.push(self.product(x, layer, y, offset)?);
            offset += layer.outputs;
        }
        self.nodes.push(Node { calls, update: None });
        Ok(y)
    }

    /// Two linear maps of one input (gate and up, for [`Builder::swiglu`]).
    ///
    /// # Errors
    /// As [`Builder::linear`].
    pub fn linear_pair(&mut self, x: Tensor, first: &Linear, second: &Linear) -> Result<[Tensor; 2], Error> {
        let outputs = [self.rows(first.outputs), self.rows(second.outputs)];
        let calls = vec![self.product(x, first, outputs[0], 0)?, self.product(x, second, outputs[1], 0)?];
        self.nodes.push(Node { calls, update: None });
        Ok(outputs)
    }

    fn product(&self, x: Tensor, layer: &Linear, y: Tensor, offset: usize) -> Result<Call, Error> {
        self.check("linear", x, layer.inputs)?;
        let Linear { inputs, outputs, orientation, .. } = *layer;
        let dims = LinearDims { rows: self.row_count(), inputs, outputs, y_stride: y.width, orientation };
        let mut reads = vec![self.whole(x), self.param(layer.weight)?];
        if let Some(bias) = layer.bias {
            reads.push(self.param(bias)?);
        }
        let to = Operand::Local { id: y.id, offset, len: dims.y_len() };
        let op = Op::Linear { dims, bias: layer.bias.is_some() };
        Ok(Call { op, reads, writes: vec![(to, false)], site: None })
    }

    /// The row of `layer` for every token of the micro-batch.
    ///
    /// # Errors
    /// A parameter that is not the block's.
    pub fn embedding(&mut self, layer: &Embedding) -> Result<Tensor, Error> {
        let y = self.rows(layer.width);
        let reads = vec![Operand::Ids, self.param(layer.table)?];
        self.add_call(Call {
            op: self.lookup(layer),
            reads,
            writes: vec![(self.whole(y), false)],
            site: None,
        });
        Ok(y)
    }

    /// Adds the row of `layer` for every position.
    ///
    /// # Errors
    /// A sequence longer than the table, or as [`Builder::linear`].
    pub fn add_positions(&mut self, x: Tensor, layer: &Embedding) -> Result<Tensor, Error> {
        self.check("add_positions", x, layer.width)?;
        let (samples, seq) = (self.samples, self.seq);
        if seq > layer.rows {
            return Err(self.error(ModelError::Positions { seq, positions: layer.rows }));
        }
        let positions = self.value(1, DType::U32, Category::Workspace);
        let y = self.rows(layer.width);
        let (ids, to) = ((self.whole(positions), false), (self.whole(y), true));
        let reads = vec![self.whole(positions), self.param(layer.table)?];
        let calls = vec![
            Call { op: Op::Positions { samples, seq }, reads: vec![], writes: vec![ids], site: None },
            Call { op: self.lookup(layer), reads, writes: vec![to], site: None },
        ];
        self.nodes.push(Node { calls, update: Some(x.id) });
        Ok(y)
    }

    fn lookup(&self, layer: &Embedding) -> Op {
        Op::Embedding { rows: self.row_count(), width: layer.width, table_rows: layer.rows }
    }

    /// Root-mean-square norm of every row.
    ///
    /// # Errors
    /// As [`Builder::linear`].
    pub fn rms_norm(&mut self, x: Tensor, layer: &RmsNorm) -> Result<Tensor, Error> {
        self.check("rms_norm", x, layer.width)?;
        let reads = vec![self.whole(x), self.param(layer.weight)?];
        let op = Op::RmsNorm { rows: self.row_count(), width: layer.width, eps: layer.eps };
        Ok(self.with_statistics(op, reads, layer.width, 1))
    }

    /// Layer norm of every row.
    ///
    /// # Errors
    /// As [`Builder::linear`].
    pub fn layer_norm(&mut self, x: Tensor, layer: &LayerNorm) -> Result<Tensor, Error> {
        self.check("layer_norm", x, layer.width)?;
        let reads = vec![self.whole(x), self.param(layer.weight)?, self.param(layer.bias)?];
        let op = Op::LayerNorm { rows: self.row_count(), width: layer.width, eps: layer.eps };
        Ok(self.with_statistics(op, reads, layer.width, 2))
    }

    /// An operation that leaves some statistics of every row beside its output.
    fn with_statistics(&mut self, op: Op, reads: Vec<Operand>, width: usize, per_row: usize) -> Tensor {
        let y = self.rows(width);
        let stats = self.value(per_row, self.dtype.master(), Category::Workspace);
        let writes = vec![(self.whole(y), false), (self.whole(stats), false)];
        self.add_call(Call { op, reads, writes, site: None });
        y
    }

    /// Rotates queries and keys of packed rows.
    ///
    /// # Errors
    /// A width that does not fit.
    pub fn rope(&mut self, qkv: Tensor, heads: &Attention, rope: &Rope) -> Result<Tensor, Error> {
        self.check("rope", qkv, heads.packed())?;
        let inverse_frequencies = Arc::clone(&rope.inverse_frequencies);
        let dims = heads.dims(self.samples, self.seq);
        Ok(self.in_place(qkv, Op::Rope { dims, inverse_frequencies, backward: false }, None))
    }

    /// Causal self-attention of packed rows.
    ///
    /// # Errors
    /// A width that does not fit.
    pub fn attention(&mut self, qkv: Tensor, heads: &Attention) -> Result<Tensor, Error> {
        self.check("attention", qkv, heads.packed())?;
        let site = self.site(heads.dropout);
        let dims = heads.dims(self.samples, self.seq);
        let op = Op::Attention { dims, dropout: site.map_or(0.0, |_| heads.dropout) };
        let y = self.with_statistics(op, vec![self.whole(qkv)], heads.heads * heads.head_dim, heads.heads);
        if let Some(call) = self.nodes.last_mut().and_then(|node| node.calls.last_mut()) {
            call.site = site;
        }
        Ok(y)
    }

    /// `silu(gate) * up`.
    ///
    /// # Errors
    /// Widths that differ.
    pub fn swiglu(&mut self, gate: Tensor, up: Tensor) -> Result<Tensor, Error> {
        self.check("swiglu", gate, up.width)?;
        Ok(self.pointwise(&[gate, up], |len| Op::Swiglu { len }))
    }

    /// GELU in the tanh form.
    ///
    /// # Errors
    /// None yet.
    pub fn gelu(&mut self, x: Tensor) -> Result<Tensor, Error> {
        Ok(self.pointwise(&[x], |len| Op::Gelu { len }))
    }

    /// `a + b`.
    ///
    /// # Errors
    /// Widths that differ.
    pub fn add(&mut self, a: Tensor, b: Tensor) -> Result<Tensor, Error> {
        self.check("add", a, b.width)?;
        Ok(self.pointwise(&[a, b], |len| Op::Add { len }))
    }

    /// Drops elements with probability `p` in training.
    ///
    /// # Errors
    /// None yet.
    pub fn dropout(&mut self, x: Tensor, p: f64) -> Result<Tensor, Error> {
        let Some(site) = self.site(p) else { return Ok(x) };
        let op = Op::Dropout { len: self.row_count() * x.width, samples: self.samples, p };
        Ok(self.in_place(x, op, Some(site)))
    }

    /// The next place of the model's code that may drop, if it does. All are counted, so that a number stands for the
    /// same place whatever acts.
    fn site(&mut self, p: f64) -> Option<u64> {
        self.sites += 1;
        (self.training && p > 0.0).then_some(self.sites - 1)
    }

    fn pointwise(&mut self, inputs: &[Tensor], op: impl FnOnce(usize) -> Op) -> Tensor {
        let y = self.rows(inputs[0].width);
        let reads = inputs.iter().map(|x| self.whole(*x)).collect();
        let op = op(self.row_count() * y.width);
        self.add_call(Call { op, reads, writes: vec![(self.whole(y), false)], site: None });
        y
    }

    fn in_place(&mut self, x: Tensor, op: Op, site: Option<u64>) -> Tensor {
        let y = self.rows(x.width);
        let calls = vec![Call { op, reads: vec![], writes: vec![(self.whole(y), false)], site }];
        self.nodes.push(Node { calls, update: Some(x.id) });
        y
    }

    fn add_call(&mut self, call: Call) {
        self.nodes.push(Node { calls: vec![call], update: None });
    }

    fn rows(&mut self, width: usize) -> Tensor {
        self.value(width, self.dtype, Category::Activation)
    }

    fn value(&mut self, width: usize, dtype: DType, category: Category) -> Tensor {
        self.values.push(Decl { rows: self.row_count(), width, dtype, category });
        Tensor { id: self.values.len() - 1, width }
    }

    fn whole(&self, tensor: Tensor) -> Operand {
        Operand::Local { id: tensor.id, offset: 0, len: self.row_count() * tensor.width }
    }

    fn row_count(&self) -> usize {
        self.samples * self.seq
    }

    fn param(&self, id: ParamId) -> Result<Operand, Error> {
        let block = self.spec.block(self.block);
        block.params.iter().position(|&param| param == id).map(Operand::Param).ok_or_else(|| {
            Error::Parameter {
                block: block.name.clone(),
                param: self.spec.param(id).fqn.clone(),
                why: "is not in the block's list of parameters",
            }
        })
    }

    fn check(&self, op: &'static str, x: Tensor, expected: usize) -> Result<(), Error> {
        if x.width == expected {
            return Ok(());
        }
        Err(self.error(ModelError::Width { op, expected, got: x.width }))
    }
}
