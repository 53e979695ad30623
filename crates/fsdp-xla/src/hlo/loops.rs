//! Loops.

use super::operation::{Operation, lines};
use super::{Builder, Element, Name, Shape, Value, list};

/// A loop whose body is under construction.
pub(crate) struct Loop {
    number: usize,
    /// The text before the body.
    head: String,
    /// The operations before the loop.
    before: Vec<Operation>,
    /// The index and the carried values, by their names in the body.
    carried: Vec<Value>,
}

impl Loop {
    /// The index of the current round.
    pub(crate) fn index(&self) -> &Value {
        &self.carried[0]
    }

    /// The carried values at the start of a round.
    pub(crate) fn values(&self) -> &[Value] {
        &self.carried[1..]
    }
}

impl Builder {
    /// Begins a loop of `rounds` rounds with these initial values. The body can use earlier values; values of the body
    /// cannot be used after the loop.
    pub(crate) fn begin_loop(&mut self, rounds: usize, values: &[Value]) -> Loop {
        let first = self.int(0, &[], Element::I32);
        let starts: Vec<&Value> = std::iter::once(&first).chain(values).collect();
        let number = self.next;
        self.next += 1;
        let carried: Vec<Value> = (starts.iter().enumerate())
            .map(|(part, value)| Value { name: Name::Carried(number, part), shape: value.shape.clone() })
            .collect();
        let own =
            list(carried.iter().zip(&starts).map(|(own, start)| format!("{} = {}", own.name, start.name)));
        let shapes = list(carried.iter().map(|value| &value.shape));
        let before = std::mem::take(&mut self.operations);
        let rounds = self.int(rounds as i64, &[], Element::I32);
        let has_next = self.compare("LT", &carried[0], &rounds);
        let condition = lines(&std::mem::take(&mut self.operations));
        let head = format!(
            "stablehlo.while({own}) : {shapes}\n    cond {{\n{condition}    stablehlo.return {} : {}\n    }} do {{\n",
            has_next.name, has_next.shape
        );
        Loop { number, head, before, carried }
    }

    /// Ends a loop with the values at the end of a round. Returns those of the last round.
    pub(crate) fn end_loop(&mut self, open: Loop, values: &[Value]) -> Vec<Value> {
        let next = self.with_int("add", open.index(), 1);
        let ends: Vec<&Value> = std::iter::once(&next).chain(values).collect();
        let shapes: Vec<Shape> = open.carried.iter().map(|value| value.shape.clone()).collect();
        assert!(ends.iter().map(|end| &end.shape).eq(&shapes), "rounds end with what they begin with");
        let body = std::mem::replace(&mut self.operations, open.before);
        let text = format!(
            "{}{}    stablehlo.return {} : {}\n    }}",
            open.head,
            lines(&body),
            list(ends.iter().map(|end| end.name)),
            list(&shapes)
        );
        let collectives = body.iter().flat_map(Operation::collectives).cloned().collect();
        let operation = Operation::with_numbers(open.number..self.next, shapes, collectives, text);
        let results = operation.results().split_off(1);
        self.operations.push(operation);
        results
    }
}
