//! Rewrites a run as a loop.

use std::collections::HashMap;
use std::ops::Range;

use super::flow::{Flow, Output, RoundResult, Source};
use super::joined::{self, Joined};
use super::stack::{Index, Stack};
use super::stacks::{Elements, Stacks, Updated};
use crate::hlo::operation::Operation;
use crate::hlo::{Builder, Name, Value};

/// A stack from which every round reads one element.
struct Read {
    elements: Elements,
    /// Dimensions of the element that is read.
    sizes: Vec<usize>,
}

/// A result that is kept for all rounds, as a stack.
struct Kept<'a> {
    output: &'a Output,
    /// The value in the stack: the result or, if that is a reshape, its operand, whose dimensions may suit a device
    /// better.
    result: RoundResult,
    /// Dimensions of the result.
    sizes: Vec<usize>,
    /// The stack before the loop, and the elements that the rounds replace.
    elements: Elements,
    purpose: Purpose,
}

/// What the stack of a kept result is for.
enum Purpose {
    /// Each result is read by itself, or by another loop.
    Results,
    /// It replaces an argument, in the same storage.
    Argument(usize),
    /// Later operations join the results with other values.
    Joined(Joined),
}

impl Builder {
    /// Replaces a run of operations by a loop.
    pub(super) fn write_loop(&mut self, flow: &Flow, stacks: &mut Stacks<'_>, results: &mut [Value]) {
        let mut before = std::mem::take(&mut self.operations);
        let (later, rounds) = (before.split_off(flow.run.end()), before.split_off(flow.run.start));
        self.operations = before;
        let round = &rounds[..flow.run.period];
        let read: Vec<Read> = flow.stacks.iter().map(|values| self.read(values, stacks)).collect();
        let outputs = flow.outputs.iter().filter(|output| output.chain.is_none());
        let kept: Vec<Kept<'_>> =
            outputs.map(|output| self.kept(round, flow, output, (stacks, &later))).collect();
        let loop_results = self.write_rounds(round, flow, &read, &kept);

        let (chain_values, kept_stacks) = loop_results.split_at(loop_results.len() - kept.len());
        let mut names = names_at_end(flow, chain_values);
        let joined = self.read_results(kept, kept_stacks, (&mut names, stacks));
        for operation in later {
            match joined.iter().find(|(joined, _)| joined.operations.contains(&operation.number())) {
                Some((joined, stack)) => {
                    let name = self.complete(&operation, joined, stack, (&mut names, stacks));
                    names.insert(operation.name(0), name);
                }
                None => self.operations.push(renamed(&operation, &names)),
            }
        }
        for value in results {
            value.name = names.get(&value.name).copied().unwrap_or(value.name);
        }
    }

    /// Reads the kept results that are used after the loop from their stacks; returns the joins that stacks replace.
    fn read_results(
        &mut self,
        kept: Vec<Kept<'_>>,
        kept_stacks: &[Value],
        (names, stacks): (&mut HashMap<Name, Name>, &mut Stacks<'_>),
    ) -> Vec<(Joined, Stack)> {
        let mut joined = Vec::new();
        for (kept, value) in kept.into_iter().zip(kept_stacks) {
            let stack = Stack { value: value.clone(), ..kept.elements.stack.clone() };
            for (&round, &name) in &kept.output.read {
                let number = kept.elements.index(round);
                let found = stack.at(self, number);
                let found = self.reshape(&found, &kept.sizes);
                stacks.record(found.name, &stack, number);
                names.insert(name, found.name);
            }
            match kept.purpose {
                Purpose::Results => {}
                Purpose::Argument(argument) => {
                    let places = kept.output.read.keys().map(|&round| kept.elements.index(round)).collect();
                    stacks.arguments[argument].updated = Some(Updated { stack, places });
                }
                Purpose::Joined(join) => joined.push((join, stack)),
            }
        }
        joined
    }

    /// Finds the existing stack of these values, or creates one.
    fn read(&mut self, values: &[Value], stacks: &mut Stacks<'_>) -> Read {
        let sizes = values[0].shape.dims.clone();
        let found = stacks.find(values, &self.operations).or_else(|| stacks.stack_arguments(values));
        let elements = found.unwrap_or_else(|| stacks.join(self, values));
        Read { elements, sizes }
    }

    /// Determines how an output is kept that no chain holds at the end.
    fn kept<'a>(
        &mut self,
        round: &[Operation],
        flow: &Flow,
        output: &'a Output,
        (stacks, later): (&mut Stacks<'_>, &[Operation]),
    ) -> Kept<'a> {
        let (result, rounds) = (output.result, flow.run.rounds);
        let shape = |result: RoundResult| &round[result.operation].shapes()[result.part];
        let sizes = shape(result).dims.clone();
        if let Some((argument, elements)) = stacks.owner(&output.read, rounds) {
            return Kept { output, result, sizes, elements, purpose: Purpose::Argument(argument) };
        }
        if let Some((joined, (first, step))) = joined::find(later, &output.read, rounds) {
            let stack = Stack::zeros(self, shape(result), joined.count);
            let elements = Elements { stack, first, step };
            return Kept { output, result, sizes, elements, purpose: Purpose::Joined(joined) };
        }
        let result = match flow.sources[result.operation][..] {
            [Source::SameRound(operand)] if round[result.operation].is_reshape() => operand,
            _ => result,
        };
        let elements = Elements { stack: Stack::zeros(self, shape(result), rounds), first: 0, step: 1 };
        Kept { output, result, sizes, elements, purpose: Purpose::Results }
    }

    /// Writes the loop. Its results are those of the chains, in order, followed by the kept stacks.
    fn write_rounds(
        &mut self,
        round: &[Operation],
        flow: &Flow,
        read: &[Read],
        kept: &[Kept<'_>],
    ) -> Vec<Value> {
        let starts = self.first_values(flow, kept);
        let open = self.begin_loop(flow.run.rounds, &starts);
        let (index, loop_values) = (open.index().clone(), open.values().to_vec());
        let heads: Vec<Name> = flow.slots().map(|slots| loop_values[slots.start].name).collect();
        let carried = &loop_values[loop_values.len() - kept.len()..];
        let elements: Vec<Name> =
            read.iter().map(|one| self.element(one, kept.iter().zip(carried), &index).name).collect();
        let first = self.write_round(round, flow, &heads, &elements);
        let value_of = |builder: &Self, result: RoundResult| {
            builder.operations[first + result.operation].results().swap_remove(result.part)
        };

        let mut ends = Vec::new();
        for (chain, slots) in flow.chains.iter().zip(flow.slots()) {
            ends.extend_from_slice(&loop_values[slots.start + 1..slots.end]);
            ends.push(value_of(self, chain.result));
        }
        for (Kept { elements, result, .. }, value) in kept.iter().zip(carried) {
            let stack = Stack { value: value.clone(), ..elements.stack.clone() };
            let one = value_of(self, *result);
            ends.push(stack.put(self, &one, index_in(elements, &index)));
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
        starts.extend(kept.iter().map(|kept_result| kept_result.elements.stack.value.clone()));
        starts
    }

    /// Reads a round's element of a stack. If the loop replaces these elements, it is read from the value that the loop
    /// carries, so that the stack is updated in place.
    fn element<'a>(
        &mut self,
        Read { elements, sizes }: &Read,
        mut carried: impl Iterator<Item = (&'a Kept<'a>, &'a Value)>,
        round: &Value,
    ) -> Value {
        let is_same = |other: &Elements| {
            other.stack.value.name == elements.stack.value.name
                && (other.first, other.step) == (elements.first, elements.step)
        };
        let mut stack = elements.stack.clone();
        if let Some((_, value)) = carried.find(|(kept, _)| is_same(&kept.elements)) {
            stack.value = value.clone();
        }
        let found = stack.get(self, index_in(elements, round));
        self.reshape(&found, sizes)
    }

    /// Writes the operations of a round, with operands from chains and stacks; returns the index of the first.
    fn write_round(&mut self, round: &[Operation], flow: &Flow, heads: &[Name], elements: &[Name]) -> usize {
        let first = self.operations.len();
        for (operation, sources) in round.iter().zip(&flow.sources) {
            let copy = operation.renumbered(self.next, |operand| match sources[operand] {
                Source::SameRound(result) => self.operations[first + result.operation].name(result.part),
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

fn index_in<'a>(elements: &Elements, round: &'a Value) -> Index<'a> {
    Index { round, first: elements.first, step: elements.step }
}

/// Maps results that chains hold at the end of the loop, or that repeat values from before it, to their names after it.
fn names_at_end(flow: &Flow, chain_values: &[Value]) -> HashMap<Name, Name> {
    let slots: Vec<Range<usize>> = flow.slots().collect();
    let mut names: HashMap<Name, Name> = flow.repeated.iter().copied().collect();
    for output in &flow.outputs {
        let Some(chain) = output.chain else { continue };
        let after = |round: usize| slots[chain].end - (flow.run.rounds - round);
        names.extend(output.read.iter().map(|(&round, &name)| (name, chain_values[after(round)].name)));
    }
    names
}

/// Replaces names of operands.
pub(super) fn renamed(operation: &Operation, names: &HashMap<Name, Name>) -> Operation {
    let operands = operation.operands();
    if !operands.iter().any(|name| names.contains_key(name)) {
        return operation.clone();
    }
    operation.renumbered(operation.number(), |operand| {
        let name = operands[operand];
        names.get(&name).copied().unwrap_or(name)
    })
}
