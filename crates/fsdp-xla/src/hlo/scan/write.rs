//! Rewrites a run as a loop.

use std::collections::HashMap;
use std::ops::Range;

use super::flow::{Flow, Made, Output, Source};
use super::stack::{Index, Stack, Stacks};
use super::{Builder, Name, Operation, Shape, Value};

/// A stack from which every round reads one element.
struct Read {
    stack: Stack,
    first: usize,
    step: isize,
    /// Dimensions of the element that is read.
    sizes: Vec<usize>,
}

/// A result that is kept for all rounds, as a stack.
struct Kept<'a> {
    output: &'a Output,
    /// The value in the stack: the result or, if that is a reshape, its operand, whose dimensions may suit a device
    /// better.
    made: Made,
    element: Shape,
    /// Dimensions of the result.
    sizes: Vec<usize>,
}

impl Builder {
    /// Replaces a run of operations by a loop.
    pub(super) fn write_loop(&mut self, flow: &Flow, stacks: &mut Stacks, results: &mut [Value]) {
        let mut before = std::mem::take(&mut self.operations);
        let (later, rounds) = (before.split_off(flow.run.end()), before.split_off(flow.run.start));
        self.operations = before;
        let round = &rounds[..flow.run.period];
        let read: Vec<Read> = flow.stacks.iter().map(|values| self.read(values, stacks)).collect();
        let kept: Vec<Kept<'_>> =
            flow.outputs.iter().filter_map(|output| kept(round, flow, output)).collect();
        let made = self.write_rounds(round, flow, &read, &kept);

        let (last, whole) = made.split_at(made.len() - kept.len());
        let mut names = names_at_end(flow, last);
        for (Kept { output, element, sizes, .. }, whole) in kept.iter().zip(whole) {
            let stack = Stack::new(whole.clone(), element.clone(), flow.run.rounds);
            for (&number, &name) in &output.read {
                let found = stack.at(self, number);
                let found = self.reshape(&found, sizes);
                stacks.note(found.name, &stack, number);
                names.insert(name, found.name);
            }
        }
        self.operations.extend(later.iter().map(|one| renamed(one, &names)));
        for value in results {
            value.name = names.get(&value.name).copied().unwrap_or(value.name);
        }
    }

    /// Finds the existing stack of these values, or creates one.
    fn read(&mut self, values: &[Value], stacks: &mut Stacks) -> Read {
        let sizes = values[0].shape.dims.clone();
        if let Some((stack, first, step)) = stacks.find(values, &self.operations) {
            return Read { stack, first, step, sizes };
        }
        let stack = Stack::of(self, values);
        values.iter().enumerate().for_each(|(number, value)| stacks.note(value.name, &stack, number));
        Read { stack, first: 0, step: 1, sizes }
    }

    /// Writes the loop. Its results are those of the chains, in order, followed by the new stacks.
    fn write_rounds(
        &mut self,
        round: &[Operation],
        flow: &Flow,
        read: &[Read],
        kept: &[Kept<'_>],
    ) -> Vec<Value> {
        let starts = self.first_values(flow, kept);
        let open = self.begin_loop(flow.run.rounds, &starts);
        let (index, own) = (open.index().clone(), open.values().to_vec());
        let heads: Vec<Name> = flow.slots().map(|slots| own[slots.start].name).collect();
        let elements: Vec<Name> = read.iter().map(|one| self.element(one, &index).name).collect();
        let first = self.write_round(round, flow, &heads, &elements);
        let made = |builder: &Self, made: Made| {
            builder.operations[first + made.operation].results().swap_remove(made.part)
        };

        let mut ends = Vec::new();
        for (chain, slots) in flow.chains.iter().zip(flow.slots()) {
            ends.extend_from_slice(&own[slots.start + 1..slots.end]);
            ends.push(made(self, chain.made));
        }
        let stacks = own[ends.len()..].to_vec();
        for (kept, whole) in kept.iter().zip(stacks) {
            let stack = Stack::new(whole, kept.element.clone(), flow.run.rounds);
            let one = made(self, kept.made);
            ends.push(stack.put(self, &one, Index { round: &index, first: 0, step: 1 }));
        }
        self.end_loop(open, &ends)
    }

    /// The initial values of the loop.
    fn first_values(&mut self, flow: &Flow, kept: &[Kept<'_>]) -> Vec<Value> {
        let mut starts = Vec::new();
        for chain in &flow.chains {
            for start in &chain.starts {
                let zeros = || self.zeros(chain.value.dims(), chain.value.element());
                starts.push(start.clone().unwrap_or_else(zeros));
            }
        }
        starts.extend(kept.iter().map(|one| Stack::zeros(self, &one.element, flow.run.rounds)));
        starts
    }

    /// Reads a round's element of a stack.
    fn element(&mut self, read: &Read, round: &Value) -> Value {
        let found = read.stack.get(self, Index { round, first: read.first, step: read.step });
        self.reshape(&found, &read.sizes)
    }

    /// Writes the operations of a round, with operands from chains and stacks; returns the index of the first.
    fn write_round(&mut self, round: &[Operation], flow: &Flow, heads: &[Name], elements: &[Name]) -> usize {
        let first = self.operations.len();
        for (operation, sources) in round.iter().zip(&flow.sources) {
            let copy = operation.again(self.next, |operand| match sources[operand] {
                Source::Own(made) => self.operations[first + made.operation].name(made.part),
                Source::Outside(name) => name,
                Source::Chain(chain) => heads[chain],
                Source::Stack(stack) => elements[stack],
            });
            self.next += copy.count();
            self.operations.push(copy);
        }
        first
    }
}

/// How an output is kept, if no chain holds it at the end.
fn kept<'a>(round: &[Operation], flow: &Flow, output: &'a Output) -> Option<Kept<'a>> {
    let (made, shape) = (output.made, |made: Made| &round[made.operation].shapes()[made.part]);
    let before = match flow.sources[made.operation][..] {
        [Source::Own(before)] if round[made.operation].is_reshape() => before,
        _ => made,
    };
    let (element, sizes) = (shape(before).clone(), shape(made).dims.clone());
    output.chain.is_none().then_some(Kept { output, made: before, element, sizes })
}

/// Maps results that chains hold at the end of the loop to their names after it.
fn names_at_end(flow: &Flow, last: &[Value]) -> HashMap<Name, Name> {
    let slots: Vec<Range<usize>> = flow.slots().collect();
    let mut names = HashMap::new();
    for output in &flow.outputs {
        let Some(chain) = output.chain else { continue };
        let after = |round: usize| slots[chain].end - (flow.run.rounds - round);
        names.extend(output.read.iter().map(|(&round, &name)| (name, last[after(round)].name)));
    }
    names
}

fn renamed(operation: &Operation, names: &HashMap<Name, Name>) -> Operation {
    let operands = operation.operands();
    if !operands.iter().any(|name| names.contains_key(name)) {
        return operation.clone();
    }
    operation.again(operation.number(), |operand| {
        let name = operands[operand];
        names.get(&name).copied().unwrap_or(name)
    })
}
