//! Backward of a block: a rule for each operation.
//!
//! Numbers below that of the graph's values stand for these, which backward reads and forward therefore keeps; those
//! from there on are places of backward's own. A gradient that several values share is copied before it is written.

use fsdp_core::memory::Category;

use super::list::Draft;
use super::{BlockGraph, Call, Decl, Node, Operand, Trained};
use crate::op::Op;

/// Which values have a gradient: a trained parameter, of this block or an earlier one, has a part in them.
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

/// Backward of a block in the making.
pub(super) struct Backward<'a> {
    pub(super) graph: &'a BlockGraph,
    pub(super) trained: &'a Trained,
    pub(super) needs: Vec<bool>,
    /// The values of the graph, then the places of backward.
    pub(super) draft: Draft,
    /// The gradient of each value so far.
    pub(super) gradients: Vec<Option<usize>>,
    /// Gradients that the operation at hand reads.
    pub(super) read_now: Vec<usize>,
}

impl<'a> Backward<'a> {
    /// Before anything is known.
    pub(super) fn new(graph: &'a BlockGraph, trained: &'a Trained) -> Self {
        let draft = Draft { places: graph.values.clone(), calls: Vec::new() };
        let gradients = vec![None; graph.values.len()];
        Self { graph, trained, needs: with_gradients(graph, trained), draft, gradients, read_now: Vec::new() }
    }

    /// Whether the output has a gradient.
    pub(super) fn leads_back(&self) -> bool {
        self.needs[self.graph.output]
    }

    /// Derives all calls from the place of the output's gradient; returns that of the input's gradient.
    pub(super) fn derive(&mut self, output_gradient: usize) -> Option<usize> {
        if !self.leads_back() {
            return None;
        }
        self.gradients[self.graph.output] = Some(output_gradient);
        for node in self.graph.nodes.iter().rev() {
            self.node(node);
            self.read_now.clear();
        }
        self.gradients[self.graph.input?]
    }

    fn node(&mut self, node: &Node) {
        let output = node.main().writes[0].0.local().expect("forward writes values");
        match *node.op() {
            Op::Linear { .. } => self.linear(node),
            Op::Embedding { .. } => self.embedding(node, output),
            Op::RmsNorm { .. } | Op::LayerNorm { .. } => self.norm(node, output),
            Op::Attention { .. } => self.attention(node, output),
            Op::Swiglu { .. } | Op::Gelu { .. } => {
                if let Some(dy) = self.take(output) {
                    self.activation(node, dy, false);
                }
            }
            Op::Add { .. } => self.pass(node, output),
            Op::Rope { .. } | Op::Dropout { .. } => self.in_place(node, output),
            ref other => unreachable!("{} is no operation of forward", other.name()),
        }
    }

    /// The elements of a value: kept, or computed again.
    fn load(&mut self, value: usize) -> usize {
        let Some(node) = self.cheap(value) else { return value };
        let call = node.main();
        let reads: Vec<Operand> = call.reads.iter().map(|read| self.load_operand(*read)).collect();
        let write = |draft: &mut Draft, id: usize| {
            let decl = Decl { category: Category::Workspace, ..draft.places[id] };
            let place = draft.place(decl);
            (draft.whole(place), false)
        };
        let writes: Vec<_> = node.writes().map(|id| write(&mut self.draft, id)).collect();
        let found = writes[0].0.local().expect("it was made here");
        self.draft.call(call.op.clone(), reads, writes);
        found
    }

    fn load_operand(&mut self, operand: Operand) -> Operand {
        match operand {
            Operand::Local { id, offset, len } => Operand::Local { id: self.load(id), offset, len },
            other => other,
        }
    }

    /// The operation that makes a value again.
    fn cheap(&self, value: usize) -> Option<&'a Node> {
        let (_, node) = self.graph.producer(value)?;
        (node.is_cheap() && self.needs[value] && node.writes().next() == Some(value)).then_some(node)
    }

    fn linear(&mut self, node: &Node) {
        let mut gradients = Vec::new();
        for output in node.writes() {
            if gradients.iter().all(|(seen, _)| *seen != output) {
                gradients.push((output, self.take(output)));
            }
        }
        let dy = |call: &Call| match call.writes[0].0 {
            Operand::Local { id, offset, len } => {
                let (_, gradient) = gradients.iter().find(|(output, _)| *output == id)?;
                gradient.map(|id| Operand::Local { id, offset, len })
            }
            _ => None,
        };
        let used: Vec<(&Call, Operand)> =
            node.calls.iter().filter_map(|call| Some((call, dy(call)?))).collect();
        let Some(input) = used.first().and_then(|(call, _)| call.reads[0].local()) else { return };
        let trains = used.iter().any(|(call, _)| self.target(call.reads[1]).is_some());
        // An activation that was not kept comes back from its own backward, which needs the gradient of it first.
        let again = self.cheap(input).filter(|node| matches!(node.op(), Op::Swiglu { .. } | Op::Gelu { .. }));
        let again = again.filter(|_| trains && self.needs[input] && self.gradients[input].is_none());
        if again.is_some() {
            self.linear_input(input, &used);
        }
        if trains {
            let x = match again {
                Some(node) => {
                    let gradient = self.gradients[input].take().expect("it was just computed");
                    self.activation(node, gradient, true);
                    gradient
                }
                None => self.load(input),
            };
            for (call, dy) in &used {
                let (Some(target), Op::Linear { dims, .. }) = (self.target(call.reads[1]), &call.op) else {
                    continue;
                };
                let reads = vec![self.draft.whole(x), *dy];
                self.draft.call(Op::LinearBackwardWeight { dims: *dims }, reads, vec![target]);
            }
        }
        for (call, dy) in &used {
            let bias = call.reads.get(2).and_then(|bias| self.target(*bias));
            let (Some(target), Op::Linear { dims, .. }) = (bias, &call.op) else { continue };
            let op = Op::ColumnSums { rows: dims.rows, columns: dims.outputs, stride: dims.y_stride };
            self.draft.call(op, vec![*dy], vec![target]);
        }
        if again.is_none() && self.needs[input] {
            self.linear_input(input, &used);
        }
    }

    /// The gradient of the input of linear maps, from those of all outputs that have one.
    fn linear_input(&mut self, input: usize, used: &[(&Call, Operand)]) {
        for (call, dy) in used {
            let Op::Linear { dims, .. } = call.op else { continue };
            let dx = self.add_to(input);
            self.draft.call(Op::LinearBackwardInput { dims }, vec![*dy, call.reads[1]], vec![dx]);
        }
    }

    fn embedding(&mut self, node: &Node, output: usize) {
        let Some(dy) = self.gradients[output].take() else { return };
        let call = node.main();
        let (Op::Embedding { rows, width, table_rows }, [ids, table]) = (&call.op, &call.reads[..]) else {
            return;
        };
        if let Some(target) = self.target(*table) {
            let ids = match (*ids, node.calls.first()) {
                (Operand::Local { id, .. }, Some(positions)) => {
                    let place = self.draft.place(self.draft.places[id]);
                    let ids = self.draft.whole(place);
                    self.draft.call(positions.op.clone(), vec![], vec![(ids, false)]);
                    ids
                }
                (ids, _) => ids,
            };
            let op = Op::EmbeddingBackward { rows: *rows, width: *width, table_rows: *table_rows };
            let dy = self.draft.whole(dy);
            self.draft.call(op, vec![ids, dy], vec![target]);
        }
        if let Some(input) = node.update {
            self.put(input, dy);
        }
    }

    fn norm(&mut self, node: &Node, output: usize) {
        let Some(dy) = self.take(output) else { return };
        let call = node.main();
        let input = call.reads[0].local().expect("a norm reads a value");
        let x = self.load(input);
        let (x, dy, stats) = (self.draft.whole(x), self.draft.whole(dy), call.writes[1].0);
        let weight = call.reads[1];
        match call.op {
            Op::RmsNorm { rows, width, .. } => {
                let dx = if self.needs[input] { self.add_to(input) } else { self.scratch(input) };
                let target = self.target(weight);
                let op = Op::RmsNormBackward { rows, width, weight: target.is_some() };
                self.draft.call(op, vec![x, weight, stats, dy], std::iter::once(dx).chain(target).collect());
            }
            Op::LayerNorm { rows, width, .. } => {
                if let Some(target) = self.target(weight) {
                    let op = Op::LayerNormBackwardWeight { rows, width };
                    self.draft.call(op, vec![x, stats, dy], vec![target]);
                }
                if let Some(target) = self.target(call.reads[2]) {
                    let op = Op::ColumnSums { rows, columns: width, stride: width };
                    self.draft.call(op, vec![dy], vec![target]);
                }
                if self.needs[input] {
                    let dx = self.add_to(input);
                    let op = Op::LayerNormBackwardInput { rows, width };
                    self.draft.call(op, vec![x, weight, stats, dy], vec![dx]);
                }
            }
            _ => unreachable!("{} is no norm", call.op.name()),
        }
    }

    fn attention(&mut self, node: &Node, output: usize) {
        let Some(dy) = self.take(output) else { return };
        let call = node.main();
        let Op::Attention { dims, dropout } = call.op else { return };
        let input = call.reads[0].local().expect("attention reads a value");
        let Some(dqkv) = self.overwrite(input) else { return };
        let reads = vec![call.reads[0], call.writes[0].0, call.writes[1].0, self.draft.whole(dy)];
        let (op, writes) = (Op::AttentionBackward { dims, dropout }, vec![(self.draft.whole(dqkv), false)]);
        self.draft.calls.push(Call { op, reads, writes, site: call.site });
        self.put(input, dqkv);
    }

    /// Backward of an activation; with `again` its output is left where its gradient was.
    fn activation(&mut self, node: &Node, dy: usize, again: bool) {
        let call = node.main();
        let inputs: Vec<usize> = call.reads.iter().filter_map(Operand::local).collect();
        let mut reads: Vec<Operand> = call.reads.iter().map(|read| self.load_operand(*read)).collect();
        let len = self.draft.places[dy].len();
        let (op, slopes) = match call.op {
            Op::Swiglu { .. } => {
                let slopes = inputs.iter().map(|input| Some(self.temporary(*input))).collect();
                let op = if again { Op::SwigluBackwardAgain { len } } else { Op::SwigluBackward { len } };
                (op, slopes)
            }
            _ => {
                let op = if again { Op::GeluBackwardAgain { len } } else { Op::GeluBackward { len } };
                (op, vec![self.overwrite(inputs[0])])
            }
        };
        let slopes: Vec<usize> = slopes.into_iter().flatten().collect();
        if slopes.is_empty() {
            return;
        }
        let mut writes = Vec::new();
        let dy = self.draft.whole(dy);
        if again {
            writes.push((dy, false))
        } else {
            reads.push(dy)
        }
        writes.extend(slopes.iter().map(|slope| (self.draft.whole(*slope), false)));
        self.draft.call(op, reads, writes);
        for (input, slope) in inputs.into_iter().zip(slopes) {
            self.put(input, slope);
        }
    }

    /// Passes the gradient of the output on to all inputs, which then share it.
    fn pass(&mut self, node: &Node, output: usize) {
        let Some(gradient) = self.gradients[output].take() else { return };
        for input in node.main().reads.iter().filter_map(Operand::local) {
            self.put(input, gradient);
        }
    }

    fn in_place(&mut self, node: &Node, output: usize) {
        let Some(gradient) = self.gradients[output].take() else { return };
        let call = node.main();
        let input = node.update.expect("it works in place");
        let gradient = self.travel(input, gradient);
        let gradient = self.own(input, gradient, None);
        let op = match &call.op {
            Op::Rope { dims, inverse_frequencies, .. } => {
                Op::Rope { dims: *dims, inverse_frequencies: inverse_frequencies.clone(), backward: true }
            }
            other => other.clone(),
        };
        let writes = vec![(self.draft.whole(gradient), false)];
        self.draft.calls.push(Call { op, reads: vec![], writes, site: call.site });
        self.put(input, gradient);
    }
}
