//! Loops.

use std::fmt::Write;

use super::{Builder, Element, Name, Value, list};

/// A loop whose body is being written.
pub(crate) struct Loop {
    /// How many operations were there before.
    number: usize,
    /// The index, and the values that go from one round to the next, as the body has them.
    carried: Vec<Value>,
}

impl Loop {
    /// The number of the round.
    pub(crate) fn index(&self) -> &Value {
        &self.carried[0]
    }

    /// The values that a round begins with.
    pub(crate) fn values(&self) -> &[Value] {
        &self.carried[1..]
    }
}

impl Builder {
    /// Begins a loop of so many rounds, the first of which begins with these values. What was made before the loop can be used
    /// in it, and what is made in it only there.
    pub(crate) fn begin_loop(&mut self, rounds: usize, values: &[Value]) -> Loop {
        let first = self.int(0, &[], Element::I32);
        let starts: Vec<&Value> = std::iter::once(&first).chain(values).collect();
        let number = self.results;
        self.results += 1;
        let carried: Vec<Value> = (starts.iter().enumerate())
            .map(|(part, value)| Value { name: Name::Carried(number, part), shape: value.shape.clone() })
            .collect();
        let own =
            list(carried.iter().zip(&starts).map(|(own, start)| format!("{} = {}", own.name, start.name)));
        let shapes = list(carried.iter().map(|value| &value.shape));
        let count = carried.len();
        let _ = writeln!(self.body, "    %{number}:{count} = stablehlo.while({own}) : {shapes}\n    cond {{");
        let open = Loop { number, carried };
        let rounds = self.int(rounds as i64, &[], Element::I32);
        let goes_on = self.compare("LT", open.index(), &rounds);
        let _ =
            writeln!(self.body, "    stablehlo.return {} : {}\n    }} do {{", goes_on.name, goes_on.shape);
        open
    }

    /// Ends a loop, whose rounds end with these values. The results are those of the last one.
    pub(crate) fn end_loop(&mut self, open: &Loop, values: &[Value]) -> Vec<Value> {
        let next = self.with_int("add", open.index(), 1);
        let ends: Vec<&Value> = std::iter::once(&next).chain(values).collect();
        let shapes = |value: &Value| value.shape.clone();
        assert!(
            ends.iter().copied().map(shapes).eq(open.carried.iter().map(shapes)),
            "rounds end with what they begin with"
        );
        let (names, types) = (list(ends.iter().map(|end| end.name)), list(ends.iter().map(|end| &end.shape)));
        let _ = writeln!(self.body, "    stablehlo.return {names} : {types}\n    }}");
        let result = |(part, value): (usize, &Value)| Value {
            name: Name::Part(open.number, part + 1),
            shape: value.shape.clone(),
        };
        values.iter().enumerate().map(result).collect()
    }
}
