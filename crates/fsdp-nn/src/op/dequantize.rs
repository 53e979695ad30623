//! Decodes the quantized weight of a linear map, for one product.
//!
//! The decoded weight is scratch: forward gives it up after the product, and backward decodes it again.

use fsdp_core::Error;
use fsdp_core::memory::Category;

use super::describe::{Description, Role};
use super::{Op, Orientation};
use crate::graph::{Backward, Builder, Call, Decl, Node, Operand};
use crate::layer;
use crate::quantized::Packed;

impl Packed {
    pub(super) fn describe(&self) -> Description {
        let stored = self.stored();
        Description::new("dequantize")
            .read([Role::bytes("bytes", stored.rows * stored.row_bytes)])
            .write([Role::value("weight", self.rows * self.columns)])
            .flops(self.rows * self.columns)
    }
}

impl Builder<'_> {
    /// Returns the weight of a linear map; if it is quantized, adds the call that decodes it.
    pub(super) fn weight(&mut self, layer: &layer::Linear, calls: &mut Vec<Call>) -> Result<Operand, Error> {
        let stored = self.param(layer.weight)?;
        let Some(matrix) = self.quantized(layer.weight) else { return Ok(stored) };
        let weight = self.decoded(matrix);
        calls.push(Call::new(Op::Dequantize(matrix), vec![stored], [(weight, false)]));
        Ok(weight)
    }

    /// The order in which the weight of a linear map is read. Outputs are rows, if it is quantized.
    pub(super) fn orientation(&self, layer: &layer::Linear) -> Orientation {
        self.quantized(layer.weight).map_or(layer.orientation, |_| Orientation::OutIn)
    }

    /// Declares room for a decoded matrix.
    pub(super) fn decoded(&mut self, matrix: Packed) -> Operand {
        let Packed { rows, columns: width, .. } = matrix;
        self.declare(Decl { rows, width, dtype: self.dtype(), category: Category::Workspace })
    }
}

/// The weight of one of a node's linear maps, decoded again if it is quantized.
pub(super) fn weight(b: &mut Backward<'_>, node: &Node, weight: Operand) -> Operand {
    let Some(id) = weight.local() else { return weight };
    let decode =
        node.calls.iter().find(|call| call.writes_to(id)).expect("a weight is a parameter or decoded");
    let place = b.draft.place(b.draft.places[id]);
    let decoded = b.draft.whole(place);
    b.draft.call(decode.op.clone(), decode.reads.clone(), vec![(decoded, false)]);
    decoded
}
