//! Lowers a block's forward, whole or in part: selects the operations to run, and which of them run in place.

use fsdp_core::memory::Category;

use super::list::Draft;
use super::{BlockGraph, Call, Decl, Node, Operand};
use crate::op::{Op, Pointwise};

/// A forward run of a block under construction.
pub(super) struct Forward<'a> {
    pub(super) graph: &'a BlockGraph,
    /// The place of each value computed so far, including those available before the run.
    pub(super) places: Vec<Option<usize>>,
    /// Values that are read afterwards, except the output.
    pub(super) kept: &'a [usize],
    /// Whether the output is read afterwards.
    pub(super) with_output: bool,
    /// Whether the input has another reader.
    pub(super) input_shared: bool,
}

impl Forward<'_> {
    /// Adds the calls that compute the values read afterwards; returns the places of values.
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

    /// Returns which operations compute a value that is read and not yet available.
    fn needed(&self) -> Vec<bool> {
        let mut is_read = vec![false; self.graph.values.len()];
        self.kept.iter().for_each(|&value| is_read[value] = true);
        is_read[self.graph.output] |= self.with_output;
        let mut needed = vec![false; self.graph.nodes.len()];
        for (index, node) in self.graph.nodes.iter().enumerate().rev() {
            if node.writes().any(|id| is_read[id] && self.places[id].is_none()) {
                needed[index] = true;
                node.reads().for_each(|id| is_read[id] = true);
            }
        }
        needed
    }

    fn node(&mut self, draft: &mut Draft, node: &Node, is_read_later: impl Fn(usize) -> bool) {
        let is_read = |value: usize| {
            is_read_later(value)
                || self.kept.contains(&value)
                || (self.with_output && self.graph.output == value)
                || (self.input_shared && self.graph.input == Some(value))
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

    /// Returns a written operand, in its existing place or a new one.
    fn write(&mut self, draft: &mut Draft, (operand, add): (Operand, bool)) -> (Operand, bool) {
        if let Operand::Local { id, .. } = operand
            && self.places[id].is_none()
        {
            let decl = self.graph.values[id];
            // Statistics that backward reads are not scratch.
            let category = if self.kept.contains(&id) { Category::Activation } else { decl.category };
            self.places[id] = Some(draft.place(Decl { category, ..decl }));
        }
        (self.at(operand), add)
    }

    fn at(&self, operand: Operand) -> Operand {
        at(&self.places, operand)
    }
}

/// Replaces a value by its place; other operands stay as they are.
pub(super) fn at(places: &[Option<usize>], operand: Operand) -> Operand {
    match operand {
        Operand::Local { id, offset, len } => {
            Operand::Local { id: places[id].expect("a value is computed before it is read"), offset, len }
        }
        other => other,
    }
}
