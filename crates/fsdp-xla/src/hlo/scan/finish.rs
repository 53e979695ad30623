//! The end of a scan: stacks as inputs and outputs of the program.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::signature::{ArgumentStack, ResultStack, Signature, Stacked};
use super::stack::Stack;
use super::stacks::{StackedArgument, Stacks};
use super::write::renamed;
use crate::hlo::{Builder, Name};

impl Builder {
    /// Returns results as stacks where they are in one, and reads the arguments that are used outside of loops from their
    /// stacks.
    pub(super) fn finish_stacks(&mut self, stacks: &Stacks<'_>, signature: &mut Signature) -> Stacked {
        let arguments = stacks.arguments.iter().map(|one| self.argument_stack(one, signature)).collect();
        let mut stacked = Stacked { arguments, results: self.result_stacks(stacks, signature) };
        let operands = self.operations.iter().flat_map(|one| one.operands());
        let outputs = signature.outputs(&stacked).into_iter().map(|(value, _)| value.name);
        let read: HashSet<Name> = operands.chain(outputs).collect();

        let rest = std::mem::take(&mut self.operations);
        let mut names = HashMap::new();
        for StackedArgument { members, stack, .. } in &stacks.arguments {
            for (place, name) in members.iter().map(|&member| Name::Argument(member)).enumerate() {
                if read.contains(&name) {
                    names.insert(name, stack.at(self, place).name);
                }
            }
        }
        self.operations.extend(rest.iter().map(|one| renamed(one, &names)));
        let ends = stacked.arguments.iter_mut().filter_map(|one| one.result.as_mut());
        for value in signature.results.iter_mut().chain(ends) {
            value.name = names.get(&value.name).copied().unwrap_or(value.name);
        }
        stacked
    }

    /// The stack of an argument's contents at the end.
    fn argument_stack(&mut self, argument: &StackedArgument, signature: &Signature) -> ArgumentStack {
        let StackedArgument { members, stack, updated } = argument;
        let mut final_stack: Option<Stack> = updated.as_ref().map(|one| one.stack.clone());
        for (place, &member) in members.iter().enumerate() {
            let Some(result) = signature.aliases[member] else { continue };
            if updated.as_ref().is_some_and(|one| one.places.contains(&place)) {
                continue;
            }
            let result = &signature.results[result];
            final_stack = Some(final_stack.unwrap_or_else(|| stack.clone()).put_at(self, result, place));
        }
        let result = final_stack.map(|one| one.value);
        ArgumentStack { members: members.clone(), value: stack.value.clone(), result }
    }

    /// The stacks all of whose elements are results with storage of their own.
    fn result_stacks(&mut self, stacks: &Stacks<'_>, signature: &Signature) -> Vec<ResultStack> {
        let produced: HashSet<usize> = self.operations.iter().map(|one| one.number()).collect();
        let mut unassigned: BTreeSet<usize> = (0..signature.results.len()).collect();
        signature.aliases.iter().flatten().for_each(|result| _ = unassigned.remove(result));
        let mut found = Vec::new();
        for first in 0..signature.results.len() {
            for stack in stacks.of(signature.results[first].name) {
                let place = |result: &usize| {
                    let place = stacks.index(signature.results[*result].name, stack)?;
                    Some((place, *result))
                };
                let members: BTreeMap<usize, usize> = unassigned.iter().filter_map(place).collect();
                let is_produced = stack.value.name.number().is_some_and(|number| produced.contains(&number));
                if is_produced && members.len() == stack.count && unassigned.contains(&first) {
                    members.values().for_each(|result| _ = unassigned.remove(result));
                    let members = members.into_values().collect();
                    found.push(ResultStack {
                        members,
                        value: self.reshape(&stack.value, &[stack.value.len()]),
                    });
                }
            }
        }
        found
    }
}
