//! Derives the backward of a block by applying the rules of its operations, defined in `op`, from the last to the
//! first.
//!
//! Ids below the number of graph values denote those values; backward reads them, so forward keeps them. Higher ids
//! are places of backward. A gradient shared by several values is copied before it is written.

use fsdp_core::memory::Category;

use super::list::Draft;
use super::{BlockGraph, Call, Decl, Node, Operand, Trained};
use crate::op::Op;

/// Returns which values have a gradient: those that depend on a trained parameter of this block or an earlier one.
pub(super) fn with_gradients(graph: &BlockGraph, trained: &Trained) -> Vec<bool> {
    let mut needs = vec![false; graph.values.len()];
    if let Some(input) = graph.input {
        needs[input] = trained.input;
    }
    for node in &graph.nodes {
        let params = node.calls.iter().flat_map(|call| &call.reads);
        let trains = params.into_iter().any(|read| matches!(read, Operand::Param(i) if trained.params[*i]));
        let needed = trains || node.reads().any(|id| needs[id]);
        node.writes().for_each(|id| needs[id] = needed);
    }
    needs
}

/// The backward of a block under construction.
pub(crate) struct Backward<'a> {
    pub(super) graph: &'a BlockGraph,
    pub(super) trained: &'a Trained,
    pub(crate) needs: Vec<bool>,
    /// Places (the values of the graph, then those of backward) and calls.
    pub(crate) draft: Draft,
    /// The gradient of each value so far.
    pub(crate) gradients: Vec<Option<usize>>,
    /// Gradients that the current operation reads.
    pub(super) current_reads: Vec<usize>,
}

impl<'a> Backward<'a> {
    /// A backward without gradients or calls.
    pub(super) fn new(graph: &'a BlockGraph, trained: &'a Trained) -> Self {
        let draft = Draft { places: graph.values.clone(), calls: Vec::new() };
        let gradients = vec![None; graph.values.len()];
        Self {
            graph,
            trained,
            needs: with_gradients(graph, trained),
            draft,
            gradients,
            current_reads: Vec::new(),
        }
    }

    /// Whether the output has a gradient.
    pub(super) fn output_has_gradient(&self) -> bool {
        self.needs[self.graph.output]
    }

    /// Derives all calls from the place of the output's gradient; returns the place of the input's gradient.
    pub(super) fn derive(&mut self, output_gradient: usize) -> Option<usize> {
        if !self.output_has_gradient() {
            return None;
        }
        self.gradients[self.graph.output] = Some(output_gradient);
        for node in self.graph.nodes.iter().rev() {
            let output = node.main().writes[0].0.local().expect("forward writes values");
            node.op().derive(self, node, output);
            self.current_reads.clear();
        }
        self.gradients[self.graph.input?]
    }

    /// Returns the place of a value: the kept one, or one that is recomputed here.
    pub(crate) fn load(&mut self, value: usize) -> usize {
        let Some(node) = self.recomputed(value) else { return value };
        let call = node.main();
        let reads: Vec<Operand> = call.reads.iter().map(|read| self.load_operand(*read)).collect();
        let write = |draft: &mut Draft, id: usize| {
            let decl = Decl { category: Category::Workspace, ..draft.places[id] };
            let place = draft.place(decl);
            (draft.whole(place), false)
        };
        let writes: Vec<_> = node.writes().map(|id| write(&mut self.draft, id)).collect();
        let loaded = writes[0].0.local().expect("it was made here");
        self.draft.call(call.op.clone(), reads, writes);
        loaded
    }

    pub(crate) fn load_operand(&mut self, operand: Operand) -> Operand {
        match operand {
            Operand::Local { id, offset, len } => Operand::Local { id: self.load(id), offset, len },
            other => other,
        }
    }

    /// Returns the operation that recomputes a value, if it is not kept.
    pub(crate) fn recomputed(&self, value: usize) -> Option<&'a Node> {
        let (_, node) = self.graph.producer(value)?;
        (node.op().describe().is_recomputed && self.needs[value] && node.writes().next() == Some(value))
            .then_some(node)
    }

    /// Whether exactly one operation reads a value, so that the value's gradient is complete after that operation's
    /// backward.
    pub(crate) fn is_read_once(&self, value: usize) -> bool {
        self.graph.nodes.iter().filter(|node| node.reads().any(|id| id == value)).count() == 1
    }

    /// Takes the gradient of an output, in a place that may be overwritten with the gradient of an input of its shape.
    pub(crate) fn take_in_place(&mut self, input: usize, output: usize) -> Option<usize> {
        let gradient = self.gradients[output].take()?;
        let gradient = self.make_exportable(input, gradient);
        Some(self.make_exclusive(input, gradient, None))
    }

    /// Turns the gradient of the output of an in-place operation into the gradient of its input, by `op`.
    pub(crate) fn in_place(&mut self, node: &Node, output: usize, op: Op) {
        let input = node.update.expect("it works in place");
        let Some(gradient) = self.take_in_place(input, output) else { return };
        let writes = vec![(self.draft.whole(gradient), false)];
        let Call { reads, site, .. } = node.main().clone();
        self.draft.calls.push(Call { op, reads, writes, site });
        self.put(input, gradient);
    }
}
