//! Look-ups: tokens, and positions added to what is there.

use fsdp_core::Error;
use fsdp_core::memory::{Category, Slice, SliceMut};

use crate::backend::Backend;
use crate::conformance::Calls;
use crate::error::ModelError;
use crate::layer::Embedding;
use crate::tape::{Backward, Node, Tape, Tensor, Value};

impl<M: Backend> Tape<'_, M> {
    /// The row of `layer` for every token of the micro-batch.
    ///
    /// # Errors
    /// A parameter that is not there, or those of the memory.
    pub fn embedding(&mut self, layer: &Embedding) -> Result<Tensor<M>, Error> {
        let scope = &self.scope;
        let mut y = scope.allocate(Category::Activation, scope.batch.rows() * layer.width)?;
        let table = scope.param(layer.table)?;
        scope.memory.embedding(layer.width, scope.batch.ids, table, SliceMut::whole(&mut y), false)?;
        let trains = scope.is_trained(layer.table);
        let output = self.value(trains);
        if output.needs_gradient {
            self.record(EmbeddingNode { output, layer: *layer });
        }
        Ok(Tensor::new(y, output, layer.width))
    }

    /// Adds the row of `layer` for every position, in place if nobody else reads `x`.
    ///
    /// # Errors
    /// A sequence longer than the table, or as [`Tape::embedding`].
    pub fn add_positions(&mut self, x: Tensor<M>, layer: &Embedding) -> Result<Tensor<M>, Error> {
        self.check("add_positions", &x, layer.width)?;
        let scope = &self.scope;
        let seq = scope.batch.seq;
        if seq > layer.rows {
            return Err(scope.error(ModelError::Positions { seq, positions: layer.rows }));
        }
        let input = x.value();
        let mut y = scope.writable(Category::Activation, x.into_buffer())?;
        let positions = scope.positions()?;
        let table = scope.param(layer.table)?;
        let (ids, rows) = (Slice::whole(&positions), SliceMut::whole(&mut y));
        scope.memory.embedding(layer.width, ids, table, rows, true)?;
        let trains = scope.is_trained(layer.table);
        let output = self.value(input.needs_gradient || trains);
        if output.needs_gradient {
            self.record(PositionsNode { input, output, layer: *layer });
        }
        Ok(Tensor::new(y, output, layer.width))
    }
}

struct EmbeddingNode {
    output: Value,
    layer: Embedding,
}

impl<M: Backend> Node<M> for EmbeddingNode {
    fn backward(self: Box<Self>, walk: &mut Backward<'_, M>) -> Result<(), Error> {
        let Some(dy) = walk.take(self.output) else { return Ok(()) };
        let ids = walk.scope.batch.ids;
        match walk.gradients.target(self.layer.table) {
            Some(target) => {
                walk.scope.memory.embedding_backward(self.layer.width, ids, Slice::whole(&dy), target)
            }
            None => Ok(()),
        }
    }
}

struct PositionsNode {
    input: Value,
    output: Value,
    layer: Embedding,
}

impl<M: Backend> Node<M> for PositionsNode {
    fn backward(self: Box<Self>, walk: &mut Backward<'_, M>) -> Result<(), Error> {
        let Some(dy) = walk.take_gradient(self.output) else { return Ok(()) };
        if let Some(target) = walk.gradients.target(self.layer.table) {
            let positions = walk.scope.positions()?;
            let (ids, rows) = (Slice::whole(&positions), Slice::whole(&dy.buffer));
            walk.scope.memory.embedding_backward(self.layer.width, ids, rows, target)?;
        }
        walk.put(self.input, dy)
    }
}
