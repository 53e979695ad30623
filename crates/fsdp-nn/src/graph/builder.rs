//! The [`Builder`], which runs a model's code once per block and records its operations as a graph. The methods for
//! operations are defined in `op`, next to their descriptions.

use fsdp_core::memory::Category;
use fsdp_core::model::{BlockId, ModelSpec, ParamId};
use fsdp_core::{DType, Error};

use super::{BlockGraph, Call, Decl, Node, Operand};
use crate::cuts::{Chunks, Cuts};
use crate::error::ModelError;
use crate::layer::{Adapter, Description as Described};
use crate::op::{Op, RouterTerms};
use crate::quantized::Packed;

/// A handle to the rows that an operation produces. It may be used any number of times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    id: usize,
    width: usize,
}

impl Tensor {
    /// Elements per row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The same elements as rows of another width.
    pub(crate) fn with_width(self, width: usize) -> Self {
        Self { width, ..self }
    }

    /// A range that starts `offset` elements into the rows.
    pub(crate) fn columns(&self, offset: usize, len: usize) -> Operand {
        Operand::Local { id: self.id, offset, len }
    }
}

/// Records the operations of one block.
pub struct Builder<'a> {
    spec: &'a ModelSpec,
    block: BlockId,
    described: &'a Described,
    samples: usize,
    seq: usize,
    length: usize,
    param_dtype: DType,
    /// Of values; wider than that of parameters for operations on those that are kept so.
    dtype: DType,
    training: bool,
    packed: bool,
    cuts: Cuts,
    router_terms: Option<RouterTerms>,
    values: Vec<Decl>,
    nodes: Vec<Node>,
    sites: u64,
}

impl<'a> Builder<'a> {
    /// A builder for a block, given what is special about some linear maps. Micro-batches have `samples` samples of `seq`
    /// tokens, which are the last tokens of texts of `length`, and hold several documents each if `packed`. Dropout
    /// is active if `training`.
    pub(crate) fn new(
        (spec, block): (&'a ModelSpec, BlockId),
        described: &'a Described,
        (samples, seq, length): (usize, usize, usize),
        dtype: DType,
        (training, packed): (bool, bool),
    ) -> Self {
        let (values, nodes) = (Vec::new(), Vec::new());
        Self {
            spec,
            block,
            described,
            samples,
            seq,
            length,
            param_dtype: dtype,
            dtype,
            training,
            packed,
            cuts: Cuts::WHOLE,
            router_terms: None,
            values,
            nodes,
            sites: 0,
        }
    }

    /// Sets the balancing loss of the model's mixtures.
    pub(crate) fn with_router_terms(self, router_terms: Option<RouterTerms>) -> Self {
        Self { router_terms, ..self }
    }

    /// Cuts samples, whose rows are those of one chunk, and the experts of mixtures.
    pub(crate) fn cut(self, cuts: Cuts) -> Self {
        Self { cuts, ..self }
    }

    /// Returns the graph of the block, whose output is `output`.
    pub(crate) fn finish(self, input: Option<Tensor>, output: Tensor) -> BlockGraph {
        let input = input.map(|input| input.id);
        BlockGraph { values: self.values, nodes: self.nodes, input, output: output.id }
    }

    /// Returns the block.
    pub fn block(&self) -> BlockId {
        self.block
    }

    /// Returns the adapter of the linear map with this weight.
    pub(crate) fn adapter(&self, weight: ParamId) -> Option<Adapter> {
        self.described.adapters.get(&weight).copied()
    }

    /// Returns how the weight of a linear map is quantized, if it is.
    pub(crate) fn quantized(&self, weight: ParamId) -> Option<Packed> {
        self.described.quantized.get(&weight).map(|weight| weight.matrix)
    }

    /// Wraps an error with the name of this block.
    pub fn error(&self, source: ModelError) -> Error {
        Error::Program { block: self.spec.block(self.block).name.clone(), source: Box::new(source) }
    }

    /// Adds calls that belong together; the last one works in place of `update`, if given.
    pub(crate) fn node(&mut self, calls: Vec<Call>, update: Option<Tensor>) {
        self.nodes.push(Node { calls, update: update.map(|x| x.id) });
    }

    /// Adds an operation that writes statistics of every row beside its output, and possibly another one that changes
    /// both; `width` and `per_row` are the widths of the output and of the statistics.
    pub(crate) fn with_statistics(
        &mut self,
        (op, reads): (Op, Vec<Operand>),
        [width, per_row]: [usize; 2],
        site: Option<u64>,
        then: impl FnOnce([(Operand, bool); 2]) -> Option<Call>,
    ) -> Tensor {
        let y = self.rows(width);
        let stats = self.value(per_row, self.dtype.master(), Category::Workspace);
        let writes = [(self.whole(y), false), (self.whole(stats), false)];
        let first = Call { op, reads, writes: writes.to_vec(), site };
        self.node(std::iter::once(first).chain(then(writes)).collect(), None);
        y
    }

    /// Adds an operation that works in place of `x`; `reads` are its other operands, which are not values.
    pub(crate) fn in_place(&mut self, x: Tensor, op: Op, reads: Vec<Operand>, site: Option<u64>) -> Tensor {
        let y = self.rows(x.width);
        let writes = vec![(self.whole(y), false)];
        self.node(vec![Call { op, reads, writes, site }], Some(x));
        y
    }

    /// Returns the number of the next dropout site, if it drops elements. Inactive sites are counted too, so that a
    /// number always denotes the same place in the model's code.
    pub(crate) fn site(&mut self, p: f64) -> Option<u64> {
        self.sites += 1;
        (self.training && p > 0.0).then_some(self.sites - 1)
    }

    /// Declares the rows that an operation produces.
    pub(crate) fn rows(&mut self, width: usize) -> Tensor {
        self.value(width, self.dtype, Category::Activation)
    }

    pub(crate) fn value(&mut self, width: usize, dtype: DType, category: Category) -> Tensor {
        self.values.push(Decl { rows: self.row_count(), width, dtype, category });
        Tensor { id: self.values.len() - 1, width }
    }

    /// Declares a value that is not one row per token.
    pub(crate) fn declare(&mut self, decl: Decl) -> Operand {
        self.values.push(decl);
        Operand::Local { id: self.values.len() - 1, offset: 0, len: decl.len() }
    }

    pub(crate) fn whole(&self, tensor: Tensor) -> Operand {
        tensor.columns(0, self.row_count() * tensor.width)
    }

    pub(crate) fn row_count(&self) -> usize {
        self.samples * self.seq
    }

    /// Adds operations on some parameters: in the master dtype if one of them is kept in it, with their input converted before
    /// and their output after.
    pub(crate) fn in_kept_dtype<T>(
        &mut self,
        params: &[ParamId],
        x: Tensor,
        add: impl FnOnce(&mut Self, Tensor) -> Result<(T, Tensor), Error>,
    ) -> Result<(T, Tensor), Error> {
        if !params.iter().any(|&id| self.is_kept(id)) {
            return add(self, x);
        }
        let dtype = std::mem::replace(&mut self.dtype, self.param_dtype.master());
        let x = self.converted(x);
        let (more, y) = add(self, x)?;
        self.dtype = dtype;
        Ok((more, self.converted(y)))
    }

    /// Whether a parameter is wider than the values around it.
    pub(crate) fn is_kept(&self, id: ParamId) -> bool {
        self.spec.param(id).keep_f32 && self.dtype != self.dtype.master()
    }

    /// The same rows in the dtype of operations that are added next.
    pub(crate) fn converted(&mut self, x: Tensor) -> Tensor {
        if self.values[x.id].dtype == self.dtype { x } else { self.convert(x) }
    }

    /// The dtype of values.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// The model's mixtures with their balancing loss; `None` without mixtures and outside of training.
    pub(crate) fn router_terms(&self) -> Option<RouterTerms> {
        self.router_terms.filter(|_| self.training)
    }

    /// Whether samples pack several documents.
    pub(crate) fn is_packed(&self) -> bool {
        self.packed
    }

    /// Whether positions are read, because they are not the index of a row within its sample.
    pub(crate) fn reads_positions(&self) -> bool {
        self.packed || self.cuts.samples.count > 1
    }

    /// How samples are cut into chunks.
    pub(crate) fn chunks(&self) -> Chunks {
        self.cuts.samples
    }

    /// How the experts of mixtures are cut into chunks.
    pub(crate) fn expert_chunks(&self) -> Chunks {
        self.cuts.experts
    }

    /// Whether rows may be sent only to the ranks of their experts.
    pub(crate) fn sends_rows(&self) -> bool {
        self.cuts.sends_rows
    }

    /// Adds operations on rows of whole samples; `add` receives the number of positions of a chunk.
    pub(crate) fn with_whole_samples<T>(&mut self, add: impl FnOnce(&mut Self, usize) -> T) -> T {
        let positions = std::mem::replace(&mut self.seq, self.length);
        let result = add(self, positions);
        self.seq = positions;
        result
    }

    /// The number of samples, and of tokens per sample.
    pub(crate) fn batch(&self) -> (usize, usize) {
        (self.samples, self.seq)
    }

    /// Total tokens of the text that a sample ends; the earlier ones are not among the rows.
    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Returns the operand of a parameter of the block, which is gathered in the dtype of the operation.
    pub(crate) fn param(&self, id: ParamId) -> Result<Operand, Error> {
        let (param, gathered) = (self.spec.param(id), self.spec.param(id).gathered_dtype(self.param_dtype));
        if gathered.is_float() && gathered != self.dtype {
            let (name, dtype) = (param.fqn.clone(), self.dtype);
            return Err(self.error(ModelError::Dtype { name, gathered, dtype }));
        }
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
