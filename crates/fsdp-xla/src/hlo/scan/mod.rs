//! Turns operations that are repeated layer by layer into loops.
//!
//! A traced program lists the operations of every layer one after the other, so compile time grows with depth. This
//! module finds ranges that repeat equal operations ([`runs`]), traces each operand to its source ([`flow`]), and
//! writes a loop whose body is one of the rounds ([`write`](mod@write)). It knows nothing of layers: work that a
//! schedule does early or late, such as the gather of the next unit, is carried from one round to the next as
//! before.
//!
//! Values of a single round are elements of one value for all rounds, a *stack* ([`stacks`]). Arguments, such as the
//! parameters and the optimizer state of layers, are passed as stacks, and stacks of new parameters reuse their storage.
//!
//! LLVM calls this loop rerolling; models for JAX and PyTorch/XLA are written with a `scan` over layers to the same
//! end.

mod finish;
mod flow;
mod joined;
mod runs;
mod sequence;
mod stack;
mod stacks;
mod write;

use std::collections::{HashMap, HashSet};

use super::{Builder, Name, Operation, Shape, Value};
use flow::Flow;
use runs::{Stretch, stretches};
use stacks::Stacks;

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

/// The operations of a program, and the source of each value.
struct Listing<'a> {
    operations: &'a [Operation],
    operands: Vec<Vec<Name>>,
    /// Index in the list of each operation number.
    places: HashMap<usize, usize>,
    arguments: &'a [Shape],
    results: &'a [Value],
}

impl<'a> Listing<'a> {
    fn new(operations: &'a [Operation], arguments: &'a [Shape], results: &'a [Value]) -> Self {
        let operands = operations.iter().map(Operation::operands).collect();
        let places = operations.iter().enumerate().map(|(place, one)| (one.number(), place)).collect();
        Self { operations, operands, places, arguments, results }
    }

    /// Index of the operation that produces a value, and which of its results it is; `None` for arguments.
    fn producer(&self, name: Name) -> Option<(usize, usize)> {
        let part = if let Name::Part(_, part) = name { part } else { 0 };
        self.places.get(&name.number()?).map(|&place| (place, part))
    }

    fn value(&self, name: Name) -> Value {
        let shape = match (name, self.producer(name)) {
            (Name::Argument(number), _) => &self.arguments[number],
            (_, Some((place, part))) => &self.operations[place].shapes()[part],
            _ => panic!("{name} is made before it is read"),
        };
        Value { name, shape: shape.clone() }
    }

    /// Numbers the kinds of operations: equal operations have equal numbers.
    fn kinds(&self) -> Vec<usize> {
        let mut known = HashMap::new();
        let mut number = |kind: String| {
            let next = known.len();
            *known.entry(kind).or_insert(next)
        };
        self.operations.iter().map(|one| number(one.kind())).collect()
    }
}

impl Builder {
    /// Turns repeated operations into loops. Returns their number, and the arguments and results that are stacks now;
    /// arguments that are already stored `together` stay so. Results are renamed to their new names. With `in_parallel`, a
    /// device may run operations beside a loop, so collectives are kept from that.
    pub(crate) fn scan(
        &mut self,
        signature: &mut Signature,
        together: &[Vec<usize>],
        in_parallel: bool,
    ) -> (usize, Stacked) {
        let (mut stacks, mut loops) = (Stacks::new(signature, together), 0);
        while let Some(flow) = self.next_run(&stacks.shapes, &signature.results, in_parallel) {
            self.write_loop(&flow, &mut stacks, &mut signature.results);
            loops += 1;
        }
        let stacked = self.finish_stacks(&stacks, signature);
        self.sweep(signature.outputs(&stacked).into_iter().map(|(value, _)| value));
        if in_parallel {
            let of_stacks = stacked.arguments.iter().map(|stack| stack.value.shape.clone());
            let shapes: Vec<Shape> = signature.arguments.iter().cloned().chain(of_stacks).collect();
            self.sequence_collectives(&shapes);
        }
        (loops, stacked)
    }

    /// Tries the shortest rounds first, since longer ones may contain them, but those without matrix products before
    /// others: updates visit the parameters of all layers, so the stacks of these are complete.
    fn next_run(&self, arguments: &[Shape], results: &[Value], in_parallel: bool) -> Option<Flow> {
        let listing = Listing::new(&self.operations, arguments, results);
        let mut found = stretches(&listing.kinds());
        // Collectives are kept in sequence with loops that are in no other loop only.
        let may_be_loop = |stretch: &Stretch| !(in_parallel && stretch.has_loop(&listing));
        found.retain(|stretch| stretch.is_of_layers(&listing) && may_be_loop(stretch));
        found.sort_by_key(|stretch| stretch.has_product(&listing));
        found.into_iter().map(|stretch| stretch.run(&listing)).find_map(|run| Flow::of(&listing, run))
    }

    /// Removes operations whose results are not read. Collectives stay: all ranks issue the same ones.
    fn sweep<'a>(&mut self, results: impl Iterator<Item = &'a Value>) {
        let mut read: HashSet<usize> = results.filter_map(|value| value.name.number()).collect();
        let mut kept = Vec::new();
        for operation in std::mem::take(&mut self.operations).into_iter().rev() {
            if read.contains(&operation.number()) || !operation.collectives().is_empty() {
                read.extend(operation.operands().iter().filter_map(|name| name.number()));
                kept.push(operation);
            }
        }
        kept.reverse();
        self.operations = kept;
    }
}
