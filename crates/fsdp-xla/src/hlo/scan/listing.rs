//! The operations of a program, as a list.

use std::collections::HashMap;

use crate::hlo::operation::Operation;
use crate::hlo::{Name, Shape, Value};

/// The operations of a program, and the source of each value.
pub(super) struct Listing<'a> {
    pub(super) operations: &'a [Operation],
    pub(super) operands: Vec<Vec<Name>>,
    /// Index in the list of each operation number.
    pub(super) places: HashMap<usize, usize>,
    pub(super) arguments: &'a [Shape],
    pub(super) results: &'a [Value],
}

impl<'a> Listing<'a> {
    pub(super) fn new(operations: &'a [Operation], arguments: &'a [Shape], results: &'a [Value]) -> Self {
        let operands = operations.iter().map(Operation::operands).collect();
        let places = operations.iter().enumerate().map(|(place, one)| (one.number(), place)).collect();
        Self { operations, operands, places, arguments, results }
    }

    /// Index of the operation that produces a value, and which of its results it is; `None` for arguments.
    pub(super) fn producer(&self, name: Name) -> Option<(usize, usize)> {
        let part = if let Name::Part(_, part) = name { part } else { 0 };
        self.places.get(&name.number()?).map(|&place| (place, part))
    }

    pub(super) fn value(&self, name: Name) -> Value {
        let shape = match (name, self.producer(name)) {
            (Name::Argument(number), _) => &self.arguments[number],
            (_, Some((place, part))) => &self.operations[place].shapes()[part],
            _ => panic!("{name} is made before it is read"),
        };
        Value { name, shape: shape.clone() }
    }

    /// Numbers the kinds of operations: equal operations have equal numbers.
    pub(super) fn kinds(&self) -> Vec<usize> {
        let mut known = HashMap::new();
        let mut number = |kind: String| {
            let next = known.len();
            *known.entry(kind).or_insert(next)
        };
        self.operations.iter().map(|one| number(one.kind())).collect()
    }
}
