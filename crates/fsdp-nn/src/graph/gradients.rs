//! Gradients of values in backward: the first that reaches a value is written, later ones are added, and what several
//! values share is copied before it is written.

use fsdp_core::memory::Category;

use super::derive::Backward;
use super::{Decl, Operand};
use crate::op::{Op, Pointwise};

impl Backward<'_> {
    /// Where the gradient of a parameter goes, if it is trained. Whether it is added to is known when the call runs: the first of
    /// a micro-batch overwrites.
    pub(crate) fn target(&self, param: Operand) -> Option<(Operand, bool)> {
        match param {
            Operand::Param(index) if self.trained.params[index] => {
                Some((Operand::ParamGradient(index), false))
            }
            _ => None,
        }
    }

    /// The complete gradient of a value, for an operation that reads it.
    pub(crate) fn take(&mut self, value: usize) -> Option<usize> {
        let gradient = self.gradients[value].take();
        self.read_now.extend(gradient);
        gradient
    }

    /// Passes a complete contribution to the gradient of a value on to it.
    pub(crate) fn put(&mut self, value: usize, gradient: usize) {
        if !self.needs[value] {
            return;
        }
        let total = match self.gradients[value].take() {
            None => self.travel(value, gradient),
            Some(so_far) => {
                let total = self.own(value, so_far, Some(gradient));
                let (from, to) = (self.draft.whole(gradient), self.draft.whole(total));
                let len = self.draft.places[total].len();
                let op = Op::Pointwise(Pointwise::Accumulate { len });
                self.draft.call(op, vec![from], vec![(to, false)]);
                total
            }
        };
        self.gradients[value] = Some(total);
    }

    /// Where an operation that can add writes the gradient of a value, and whether it adds.
    pub(crate) fn add_to(&mut self, value: usize) -> (Operand, bool) {
        let (place, add) = match self.gradients[value].take() {
            Some(so_far) => (self.own(value, so_far, None), true),
            None => (self.draft.place(self.decl(value)), false),
        };
        self.gradients[value] = Some(place);
        (self.draft.whole(place), add)
    }

    /// Where an operation that can only overwrite leaves a gradient that is then [`Backward::put`].
    pub(crate) fn overwrite(&mut self, value: usize) -> Option<usize> {
        match (self.needs[value], self.gradients[value]) {
            (false, _) => None,
            (true, None) => Some(self.draft.place(self.decl(value))),
            (true, Some(_)) => Some(self.temporary(value)),
        }
    }

    /// Where a gradient goes that nobody wants, for operations that can not do without.
    pub(crate) fn scratch(&mut self, value: usize) -> (Operand, bool) {
        let place = self.temporary(value);
        (self.draft.whole(place), false)
    }

    pub(crate) fn temporary(&mut self, value: usize) -> usize {
        let decl = Decl { category: Category::Workspace, ..self.graph.values[value] };
        self.draft.place(decl)
    }

    /// The same gradient where nobody else reads it.
    pub(super) fn own(&mut self, value: usize, gradient: usize, other: Option<usize>) -> usize {
        let is_read = self.read_now.contains(&gradient) || other == Some(gradient);
        if !is_read && !self.gradients.contains(&Some(gradient)) {
            return gradient;
        }
        self.draft.copy(gradient, self.decl(value))
    }

    /// The same gradient, where it may leave the block if it is that of the block's input.
    pub(super) fn travel(&mut self, value: usize, gradient: usize) -> usize {
        let decl = self.decl(value);
        let is_temporary = self.draft.places[gradient].category == Category::Workspace;
        if decl.category == Category::Activation && is_temporary {
            return self.draft.copy(gradient, decl);
        }
        gradient
    }

    /// The place of a gradient. That of the block's input travels on to the block before it.
    fn decl(&self, value: usize) -> Decl {
        let travels = self.graph.input == Some(value);
        let category = if travels { Category::Activation } else { Category::Workspace };
        Decl { category, ..self.graph.values[value] }
    }
}
