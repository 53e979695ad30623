//! Table lookups by token or by position.

use fsdp_core::memory::Category;
use fsdp_core::{DType, Error};

use super::describe::{Description, Role};
use crate::error::ModelError;
use crate::graph::{Backward, Builder, Call, Node, Operand, Tensor};
use crate::layer::Embedding;
use crate::op::Op;

/// Operations of lookup tables.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "sizes are what they are called")]
pub enum Lookup {
    /// Row `i` of `y` is row `ids[i]` of `table`.
    ///
    /// `padding` has no effect on `y`; it is the one of the backward operation.
    Embedding { rows: usize, width: usize, table_rows: usize, padding: Option<usize> },
    /// Adds row `i` of `dy` to row `ids[i]` of `dtable`, in the order of `i`, except where `ids[i]` is `padding`.
    EmbeddingBackward { rows: usize, width: usize, table_rows: usize, padding: Option<usize> },
    /// Row `i` of `y` is the sum, in the order of the tree, of `terms` rows of `table` with ids from `ids[i * terms]`. The id
    /// `table_rows` is a row of zeros.
    SumRows { rows: usize, terms: usize, width: usize, table_rows: usize },
    /// The position of every row of a batch, as ids.
    Positions { samples: usize, seq: usize },
}

impl Lookup {
    pub(super) fn describe(&self) -> Description {
        match *self {
            Lookup::Embedding { rows, width, table_rows, .. } => Description::new("embedding")
                .read([
                    Role::ids("ids", rows),
                    Role::value("table", table_rows * width).touching(rows * width),
                ])
                .write([Role::value("y", rows * width).adds()]),
            Lookup::EmbeddingBackward { rows, width, table_rows, .. } => {
                Description::new("embedding_backward")
                    .read([Role::ids("ids", rows), Role::value("dy", rows * width)])
                    .write([Role::gradient("dtable", table_rows * width).adds()])
                    .flops(rows * width)
            }
            Lookup::SumRows { rows, terms, width, table_rows } => Description::new("sum_rows")
                .read([
                    Role::ids("ids", rows * terms),
                    Role::value("table", table_rows * width).touching(rows * terms * width),
                ])
                .write([Role::value("y", rows * width)])
                .flops(rows * (terms - 1) * width),
            Lookup::Positions { samples, seq } => {
                Description::new("positions").write([Role::ids("ids", samples * seq)])
            }
        }
    }
}

impl Builder<'_> {
    /// Looks up the row of `layer` for every token of the micro-batch.
    ///
    /// # Errors
    /// If a parameter does not belong to the block.
    pub fn embedding(&mut self, layer: &Embedding) -> Result<Tensor, Error> {
        let y = self.rows(layer.width);
        let reads = vec![Operand::Ids, self.param(layer.table)?];
        self.node(vec![Call::new(self.lookup(layer), reads, [(self.whole(y), false)])], None);
        Ok(y)
    }

    /// Adds the row of `layer` for every position, counted within each document.
    ///
    /// # Errors
    /// If a sequence is longer than the table, or as [`Builder::linear`].
    pub fn add_positions(&mut self, x: Tensor, layer: &Embedding) -> Result<Tensor, Error> {
        self.check("add_positions", x, layer.width)?;
        let ((samples, seq), length) = (self.batch(), self.length());
        if length > layer.rows {
            return Err(self.error(ModelError::Positions { seq: length, positions: layer.rows }));
        }
        let (y, table) = (self.rows(layer.width), self.param(layer.table)?);
        let to = self.whole(y);
        if self.reads_positions() {
            let add = Call::new(self.lookup(layer), vec![Operand::Positions, table], [(to, true)]);
            self.node(vec![add], Some(x));
            return Ok(y);
        }
        let positions = self.value(1, DType::U32, Category::Workspace);
        let ids = self.whole(positions);
        let reads = vec![ids, table];
        let positions = Op::Lookup(Lookup::Positions { samples, seq });
        let calls = vec![
            Call::new(positions, vec![], [(ids, false)]),
            Call::new(self.lookup(layer), reads, [(to, true)]),
        ];
        self.node(calls, Some(x));
        Ok(y)
    }

    fn lookup(&self, layer: &Embedding) -> Op {
        let Embedding { width, rows: table_rows, padding, .. } = *layer;
        Op::Lookup(Lookup::Embedding { rows: self.row_count(), width, table_rows, padding })
    }
}

pub(super) fn derive(b: &mut Backward<'_>, node: &Node, output: usize) {
    let Some(dy) = b.gradients[output].take() else { return };
    let call = node.main();
    let (&Op::Lookup(Lookup::Embedding { rows, width, table_rows, padding }), [ids, table]) =
        (&call.op, &call.reads[..])
    else {
        return;
    };
    if let Some(target) = b.target(*table) {
        let ids = match (*ids, node.calls.first()) {
            (Operand::Local { id, .. }, Some(positions)) => {
                let place = b.draft.place(b.draft.places[id]);
                let ids = b.draft.whole(place);
                b.draft.call(positions.op.clone(), vec![], vec![(ids, false)]);
                ids
            }
            (ids, _) => ids,
        };
        let op = Op::Lookup(Lookup::EmbeddingBackward { rows, width, table_rows, padding });
        b.draft.call(op, vec![ids, b.draft.whole(dy)], vec![target]);
    }
    if let Some(input) = node.update {
        b.put(input, dy);
    }
}
