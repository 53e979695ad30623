//! Gradients of values in backward. The first contribution to a value is written, later ones are added, and a
//! gradient shared by several values is copied before it is written.

use fsdp_core::memory::Category;

use super::derive::Backward;
use super::{Decl, Operand};
use crate::op::{Op, Pointwise};

impl Backward<'_> {
    /// Returns the destination of a parameter's gradient, or `None` if the parameter is not trained. Whether the call
    /// accumulates is decided when it runs: the first one of a micro-batch overwrites.
    pub(crate) fn target(&self, param: Operand) -> Option<(Operand, bool)> {
        match param {
            Operand::Param(index) if self.trained.params[index] => {
                Some((Operand::ParamGradient(index), false))
            }
            _ => None,
        }
    }

    /// Takes the complete gradient of a value, for an operation that reads it.
    pub(crate) fn take(&mut self, value: usize) -> Option<usize> {
        let gradient = self.gradients[value].take();
        self.current_reads.extend(gradient);
        gradient
    }

    /// Adds a complete contribution to the gradient of a value.
    pub(crate) fn put(&mut self, value: usize, gradient: usize) {
        if !self.needs[value] {
            return;
        }
        let total = match self.gradients[value].take() {
            None => self.make_exportable(value, gradient),
            Some(sum) => {
                let total = self.make_exclusive(value, sum, Some(gradient));
                let (from, to) = (self.draft.whole(gradient), self.draft.whole(total));
                let len = self.draft.places[total].len();
                let op = Op::Pointwise(Pointwise::Accumulate { len });
                self.draft.call(op, vec![from], vec![(to, false)]);
                total
            }
        };
        self.gradients[value] = Some(total);
    }

    /// Returns the destination of a value's gradient for an operation that can accumulate, and whether it must.
    pub(crate) fn add_to(&mut self, value: usize) -> (Operand, bool) {
        let (place, add) = match self.gradients[value].take() {
            Some(sum) => (self.make_exclusive(value, sum, None), true),
            None => (self.draft.place(self.decl(value)), false),
        };
        self.gradients[value] = Some(place);
        (self.draft.whole(place), add)
    }

    /// Returns a place for an operation that can only overwrite, or `None` if the value needs no gradient. The result
    /// is then passed to [`Backward::put`].
    pub(crate) fn overwrite(&mut self, value: usize) -> Option<usize> {
        match (self.needs[value], self.gradients[value]) {
            (false, _) => None,
            (true, None) => Some(self.draft.place(self.decl(value))),
            (true, Some(_)) => Some(self.temporary(value)),
        }
    }

    /// Returns a scratch destination for an unused gradient, for operations that always write it.
    pub(crate) fn scratch(&mut self, value: usize) -> (Operand, bool) {
        let place = self.temporary(value);
        (self.draft.whole(place), false)
    }

    pub(crate) fn temporary(&mut self, value: usize) -> usize {
        let decl = Decl { category: Category::Workspace, ..self.graph.values[value] };
        self.draft.place(decl)
    }

    /// Returns the gradient itself if nothing else reads it, or a copy.
    pub(super) fn make_exclusive(&mut self, value: usize, gradient: usize, other: Option<usize>) -> usize {
        let is_read = self.current_reads.contains(&gradient) || other == Some(gradient);
        if !is_read && !self.gradients.contains(&Some(gradient)) {
            return gradient;
        }
        self.draft.copy(gradient, self.decl(value))
    }

    /// Returns the gradient, copied if it is the gradient of the block's input and its place cannot leave the block.
    pub(super) fn make_exportable(&mut self, value: usize, gradient: usize) -> usize {
        let decl = self.decl(value);
        let is_temporary = self.draft.places[gradient].category == Category::Workspace;
        if decl.category == Category::Activation && is_temporary {
            return self.draft.copy(gradient, decl);
        }
        gradient
    }

    /// The declaration of a value's gradient. The gradient of the block's input travels to the previous block.
    fn decl(&self, value: usize) -> Decl {
        let leaves_block = self.graph.input == Some(value);
        let category = if leaves_block { Category::Activation } else { Category::Workspace };
        Decl { category, ..self.graph.values[value] }
    }
}
