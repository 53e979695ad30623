//! Forward of a block, whole or in part: which operations run, and which of them in place.

use fsdp_core::memory::Category;

use super::list::Draft;
use super::{BlockGraph, Call, Decl, Node, Operand};
use crate::op::{Op, Pointwise};

/// A run of a block forward.
pub(super) struct Forward<'a> {
    pub(super) graph: &'a BlockGraph,
    /// Where values lie that are there before.
    pub(super) places: Vec<Option<usize>>,
    /// Values that somebody reads afterwards, the output apart.
    pub(super) kept: &'a [usize],
    /// Whether somebody reads the output.
    pub(super) with_output: bool,
    /// Whether somebody else reads the input.
    pub(super) input_held: bool,
}

impl Forward<'_> {
    /// Adds the calls that make what is read afterwards; says where values lie.
    pub(super) fn emit(mut self, draft: &mut Draft) -> Vec<Option<usize>> {
        let needed = self.needed();
        for (index, node) in self.graph.nodes.iter().enumerate() {
            if needed[index] {
                self.node(draft, node, |value| {
                    let later = self.graph.nodes.iter().zip(&needed).skip(index + 1);
                    later.filter(|(_, needed)| **needed).any(|(node, _)| node.reads().any(|id| id == value))
                });
            }
        }
        self.places
    }

    /// Which operations make something that is read and not there.
    fn needed(&self) -> Vec<bool> {
        let mut wanted = vec![false; self.graph.values.len()];
        self.kept.iter().for_each(|&value| wanted[value] = true);
        wanted[self.graph.output] |= self.with_output;
        let mut needed = vec![false; self.graph.nodes.len()];
        for (index, node) in self.graph.nodes.iter().enumerate().rev() {
            if node.writes().any(|id| wanted[id] && self.places[id].is_none()) {
                needed[index] = true;
                node.reads().for_each(|id| wanted[id] = true);
            }
        }
        needed
    }

    fn node(&mut self, draft: &mut Draft, node: &Node, is_read_later: impl Fn(usize) -> bool) {
        let is_read = |value: usize| {
            is_read_later(value)
                || self.kept.contains(&value)
                || (self.with_output && self.graph.output == value)
                || (self.input_held && self.graph.input == Some(value))
        };
        if let (&Op::Pointwise(Pointwise::Add { len }), &[a, b]) =
            (node.op(), &node.reads().collect::<Vec<usize>>()[..])
        {
            let [a_free, b_free] = [a, b].map(|value| a != b && !is_read(value));
            let (sum, term) = if a_free && !b_free { (a, b) } else { (b, a) };
            let [sum, term] = [sum, term].map(|value| self.places[value].expect("inputs come first"));
            let output = node.writes().next().expect("a sum has an output");
            if a_free || b_free {
                self.places[output] = Some(sum);
                let (reads, writes) = (vec![draft.whole(term)], vec![(draft.whole(sum), false)]);
                draft.call(Op::Pointwise(Pointwise::Accumulate { len }), reads, writes);
                return;
            }
            let reads = vec![draft.whole(term), draft.whole(sum)];
            let writes = vec![self.write(draft, node.main().writes[0])];
            draft.call(Op::Pointwise(Pointwise::Add { len }), reads, writes);
            return;
        }
        if let Some(input) = node.update {
            let place = self.places[input].expect("inputs come first");
            let output = node.main().writes[0].0.local().expect("forward writes values");
            let is_free = !is_read(input);
            let decl = Decl { category: Category::Activation, ..draft.places[place] };
            self.places[output] = Some(if is_free { place } else { draft.copy(place, decl) });
        }
        for call in &node.calls {
            let reads = call.reads.iter().map(|read| self.at(*read)).collect();
            let writes = call.writes.iter().map(|write| self.write(draft, *write)).collect();
            draft.calls.push(Call { op: call.op.clone(), reads, writes, site: call.site });
        }
    }

    /// An operand that is written, in a place that is there or new.
    fn write(&mut self, draft: &mut Draft, (operand, add): (Operand, bool)) -> (Operand, bool) {
        if let Operand::Local { id, .. } = operand
            && self.places[id].is_none()
        {
            let decl = self.graph.values[id];
            // Statistics that backward reads are no scratch.
            let category = if self.kept.contains(&id) { Category::Activation } else { decl.category };
            self.places[id] = Some(draft.place(Decl { category, ..decl }));
        }
        (self.at(operand), add)
    }

    fn at(&self, operand: Operand) -> Operand {
        at(&self.places, operand)
    }
}

/// The place of an operand that is a value.
pub(super) fn at(places: &[Option<usize>], operand: Operand) -> Operand {
    match operand {
        Operand::Local { id, offset, len } => {
            Operand::Local { id: places[id].expect("a value is computed before it is read"), offset, len }
        }
        other => other,
    }
}
