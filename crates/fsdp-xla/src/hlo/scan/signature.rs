//! The arguments and results of a program, and which of them are stacks.

use std::collections::HashSet;

use crate::hlo::{Shape, Value};

/// The arguments and results of a program.
#[derive(Clone)]
pub(crate) struct Signature {
    /// Shapes of the arguments.
    pub(crate) arguments: Vec<Shape>,
    pub(crate) results: Vec<Value>,
    /// For each argument, the index of the result that reuses its storage.
    pub(crate) aliases: Vec<Option<usize>>,
}

/// Arguments that are passed as one, a stack.
#[derive(Clone)]
pub(crate) struct ArgumentStack {
    /// The arguments, in order.
    pub(crate) members: Vec<usize>,
    pub(crate) value: Value,
    /// The stack of their contents at the end; `None` if the program changes none of them.
    pub(crate) result: Option<Value>,
}

/// Results that are returned as one, a stack.
#[derive(Clone)]
pub(crate) struct ResultStack {
    /// The results, in order. None of them reuses the storage of an argument.
    pub(crate) members: Vec<usize>,
    pub(crate) value: Value,
}

/// What is stored as stacks.
#[derive(Clone, Default)]
pub(crate) struct Stacked {
    pub(crate) arguments: Vec<ArgumentStack>,
    pub(crate) results: Vec<ResultStack>,
}

/// What an output of a program holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OutputKind {
    /// One result, or those of a stack.
    Results(Vec<usize>),
    /// The contents at the end of the stack of arguments with this index (in an interface: of the input with it).
    Arguments(usize),
}

impl Signature {
    /// The outputs of a program: the results that are in no stack, then the stacks of arguments that change, then those of
    /// results.
    pub(crate) fn outputs<'a>(&'a self, stacked: &'a Stacked) -> Vec<(&'a Value, OutputKind)> {
        let of_arguments = stacked.arguments.iter().flat_map(|stack| &stack.members);
        let mut in_stacks: HashSet<usize> = of_arguments.filter_map(|&member| self.aliases[member]).collect();
        in_stacks.extend(stacked.results.iter().flat_map(|stack| &stack.members));
        let single = self.results.iter().enumerate().filter(|(index, _)| !in_stacks.contains(index));
        let mut outputs: Vec<(&Value, OutputKind)> =
            single.map(|(index, value)| (value, OutputKind::Results(vec![index]))).collect();
        for (index, stack) in stacked.arguments.iter().enumerate() {
            outputs.extend(stack.result.as_ref().map(|value| (value, OutputKind::Arguments(index))));
        }
        outputs
            .extend(stacked.results.iter().map(|one| (&one.value, OutputKind::Results(one.members.clone()))));
        outputs
    }
}
