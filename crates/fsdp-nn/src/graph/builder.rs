//! What a model's code is run against: every operation of a block, once, leaving a graph. The operations are methods
//! that stand beside their descriptions, in `op`.

use std::collections::BTreeMap;

use fsdp_core::memory::Category;
use fsdp_core::model::{BlockId, ModelSpec, ParamId};
use fsdp_core::{DType, Error};

use super::{BlockGraph, Call, Decl, Node, Operand};
use crate::error::ModelError;
use crate::layer::Adapter;
use crate::op::{Balance, Op};

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

    /// A range that begins in a column of the first row.
    pub(crate) fn columns(&self, offset: usize, len: usize) -> Operand {
        Operand::Local { id: self.id, offset, len }
    }
}

/// Collects the operations of one block.
pub struct Builder<'a> {
    spec: &'a ModelSpec,
    block: BlockId,
    adapters: &'a BTreeMap<ParamId, Adapter>,
    samples: usize,
    seq: usize,
    length: usize,
    dtype: DType,
    training: bool,
    packed: bool,
    balance: Option<Balance>,
    values: Vec<Decl>,
    nodes: Vec<Node>,
    sites: u64,
}

impl<'a> Builder<'a> {
    /// For a block, with the adapters of its linear maps, over micro-batches of `samples` samples of `seq` tokens that end texts of `length`, which hold
    /// several documents each if they are `packed`; dropout acts in training.
    pub(crate) fn new(
        (spec, block): (&'a ModelSpec, BlockId),
        adapters: &'a BTreeMap<ParamId, Adapter>,
        (samples, seq, length): (usize, usize, usize),
        dtype: DType,
        (training, packed): (bool, bool),
    ) -> Self {
        let (values, nodes) = (Vec::new(), Vec::new());
        Self {
            spec,
            block,
            adapters,
            samples,
            seq,
            length,
            dtype,
            training,
            packed,
            balance: None,
            values,
            nodes,
            sites: 0,
        }
    }

    /// With the balancing loss of the model's mixtures.
    pub(crate) fn balanced(self, balance: Option<Balance>) -> Self {
        Self { balance, ..self }
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

    /// What is added to the linear map of a weight.
    pub(crate) fn adapter(&self, weight: ParamId) -> Option<Adapter> {
        self.adapters.get(&weight).copied()
    }

    /// An error of this block.
    pub fn error(&self, source: ModelError) -> Error {
        Error::Program { block: self.spec.block(self.block).name.clone(), source: Box::new(source) }
    }

    /// Calls that belong together; the last works in place of `update` where there is one.
    pub(crate) fn node(&mut self, calls: Vec<Call>, update: Option<Tensor>) {
        self.nodes.push(Node { calls, update: update.map(|x| x.id) });
    }

    /// An operation that leaves some statistics of every row beside its output; the widths of both.
    pub(crate) fn with_statistics(
        &mut self,
        op: Op,
        reads: Vec<Operand>,
        [width, per_row]: [usize; 2],
        site: Option<u64>,
    ) -> Tensor {
        let y = self.rows(width);
        let stats = self.value(per_row, self.dtype.master(), Category::Workspace);
        let writes = vec![(self.whole(y), false), (self.whole(stats), false)];
        self.node(vec![Call { op, reads, writes, site }], None);
        y
    }

    /// An operation that works in place, and reads what is no value besides.
    pub(crate) fn in_place(&mut self, x: Tensor, op: Op, reads: Vec<Operand>, site: Option<u64>) -> Tensor {
        let y = self.rows(x.width);
        let writes = vec![(self.whole(y), false)];
        self.node(vec![Call { op, reads, writes, site }], Some(x));
        y
    }

    /// The next place of the model's code that may drop, if it does. All are counted, so that a number stands for the
    /// same place whatever acts.
    pub(crate) fn site(&mut self, p: f64) -> Option<u64> {
        self.sites += 1;
        (self.training && p > 0.0).then_some(self.sites - 1)
    }

    /// New rows, for an operation to make.
    pub(crate) fn rows(&mut self, width: usize) -> Tensor {
        self.value(width, self.dtype, Category::Activation)
    }

    pub(crate) fn value(&mut self, width: usize, dtype: DType, category: Category) -> Tensor {
        self.values.push(Decl { rows: self.row_count(), width, dtype, category });
        Tensor { id: self.values.len() - 1, width }
    }

    pub(crate) fn whole(&self, tensor: Tensor) -> Operand {
        tensor.columns(0, self.row_count() * tensor.width)
    }

    pub(crate) fn row_count(&self) -> usize {
        self.samples * self.seq
    }

    /// The type of its values.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// The balancing loss of the model's mixtures, in training.
    pub(crate) fn balance(&self) -> Option<Balance> {
        self.balance.filter(|_| self.training)
    }

    /// Whether samples hold several documents.
    pub(crate) fn is_packed(&self) -> bool {
        self.packed
    }

    /// Samples, and tokens of each.
    pub(crate) fn batch(&self) -> (usize, usize) {
        (self.samples, self.seq)
    }

    /// Tokens of the text that a sample ends; those before it are not among the rows.
    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// A parameter of the block.
    pub(crate) fn param(&self, id: ParamId) -> Result<Operand, Error> {
        let block = self.spec.block(self.block);
        block.params.iter().position(|&param| param == id).map(Operand::Param).ok_or_else(|| {
            Error::Parameter {
                block: block.name.clone(),
                param: self.spec.param(id).fqn.clone(),
                why: "is not in the block's list of parameters",
            }
        })
    }

    /// Checks the width of an operand.
    pub(crate) fn check(&self, op: &'static str, x: Tensor, expected: usize) -> Result<(), Error> {
        if x.width == expected {
            return Ok(());
        }
        Err(self.error(ModelError::Width { op, expected, got: x.width }))
    }
}
