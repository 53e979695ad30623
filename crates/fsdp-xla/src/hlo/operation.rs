//! An operation as text, in which value names can be found and replaced.

use std::fmt::{self, Write};
use std::ops::Range;

use super::{Collective, Name, Shape, Value};

/// An operation of a program. A loop is one operation with nested ones.
#[derive(Clone, Debug)]
pub(crate) struct Operation {
    /// Its own number, followed by those of nested operations.
    numbers: Range<usize>,
    /// The shapes of its results.
    shapes: Vec<Shape>,
    /// The collectives in it, or the one that it is, in order.
    collectives: Vec<Collective>,
    /// The text without the results.
    text: String,
}

impl Operation {
    /// Creates an operation without nested ones.
    pub(super) fn new(number: usize, shapes: Vec<Shape>, collectives: Vec<Collective>, text: String) -> Self {
        Self::with_numbers(number..number + 1, shapes, collectives, text)
    }

    /// Creates an operation with nested ones, whose numbers follow its own.
    pub(super) fn with_numbers(
        numbers: Range<usize>,
        shapes: Vec<Shape>,
        collectives: Vec<Collective>,
        text: String,
    ) -> Self {
        Self { numbers, shapes, collectives, text }
    }

    pub(super) fn number(&self) -> usize {
        self.numbers.start
    }

    /// Number of operations, nested ones included.
    pub(super) fn count(&self) -> usize {
        self.numbers.len()
    }

    pub(super) fn collectives(&self) -> &[Collective] {
        &self.collectives
    }

    /// The name of one of its results.
    pub(super) fn name(&self, part: usize) -> Name {
        if self.shapes.len() == 1 { Name::Result(self.number()) } else { Name::Part(self.number(), part) }
    }

    pub(super) fn shapes(&self) -> &[Shape] {
        &self.shapes
    }

    pub(super) fn results(&self) -> Vec<Value> {
        let result = |(part, shape): (usize, &Shape)| Value { name: self.name(part), shape: shape.clone() };
        self.shapes.iter().enumerate().map(result).collect()
    }

    /// Whether it is a reshape.
    pub(super) fn is_reshape(&self) -> bool {
        self.text.starts_with("stablehlo.reshape ")
    }

    /// Whether it is a barrier, whose results are its operands.
    pub(super) fn is_barrier(&self) -> bool {
        self.text.starts_with("stablehlo.optimization_barrier ")
    }

    /// Whether it is a matrix product or contains one.
    pub(super) fn has_product(&self) -> bool {
        self.text.contains("stablehlo.dot_general ")
    }

    /// Whether it joins vectors of equal lengths.
    pub(super) fn joins_equal_vectors(&self) -> bool {
        let is_equal = |shapes: &str| {
            let mut shapes = shapes.split(", ");
            let first = shapes.next();
            shapes.all(|shape| Some(shape) == first)
        };
        let (_, types) = self.text.split_once(" : (").unwrap_or_default();
        self.text.starts_with("stablehlo.concatenate ")
            && self.shapes[0].dims.len() == 1
            && types.split_once(") -> ").is_some_and(|(shapes, _)| is_equal(shapes))
    }

    /// The values that it reads, in text order.
    pub(super) fn operands(&self) -> Vec<Name> {
        names(&self.text).map(|(_, name)| name).filter(|name| !self.defines(*name)).collect()
    }

    fn defines(&self, name: Name) -> bool {
        match name {
            Name::Argument(_) => false,
            Name::Result(number) | Name::Part(number, _) | Name::Carried(number, _) => {
                self.numbers.contains(&number)
            }
        }
    }

    /// The text without operand names, and with its own numbers counted from 0: equal operations have equal kinds.
    pub(super) fn kind(&self) -> String {
        self.rewritten(|name, text| {
            let _ = match name {
                Some(name) => write!(text, "{}", name.moved(self.number(), 0)),
                None => write!(text, "%_"),
            };
        })
    }

    /// A copy with another number, in which operand `i` (in the order of [`Operation::operands`]) is `operand(i)`.
    pub(super) fn renumbered(&self, number: usize, mut operand: impl FnMut(usize) -> Name) -> Self {
        let mut index = 0..;
        let text = self.rewritten(|name, text| {
            let name = match name {
                Some(name) => name.moved(self.number(), number),
                None => operand(index.next().expect("the numbers do not end")),
            };
            let _ = write!(text, "{name}");
        });
        let (shapes, collectives) = (self.shapes.clone(), self.collectives.clone());
        Self::with_numbers(number..number + self.count(), shapes, collectives, text)
    }

    /// The text with names replaced: `write` is called with each of its own names, and with `None` for each operand.
    fn rewritten(&self, mut write: impl FnMut(Option<Name>, &mut String)) -> String {
        let (mut text, mut end) = (String::with_capacity(self.text.len()), 0);
        for (range, name) in names(&self.text) {
            text.push_str(&self.text[end..range.start]);
            write(Some(name).filter(|name| self.defines(*name)), &mut text);
            end = range.end;
        }
        text.push_str(&self.text[end..]);
        text
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, text) = (self.number(), &self.text);
        match self.shapes.len() {
            1 => write!(f, "%{number} = {text}")?,
            count => write!(f, "%{number}:{count} = {text}")?,
        }
        match &self.collectives[..] {
            // Collectives within a loop have their names in its text.
            [collective] if self.count() == 1 => write!(f, " loc(\"{}\")", collective.name),
            _ => Ok(()),
        }
    }
}

/// Formats operations, one per line.
pub(super) fn lines(operations: &[Operation]) -> String {
    let mut text = String::new();
    for operation in operations {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "    {operation}");
    }
    text
}

/// The value names in a text, with their positions. Names within regions of operations (`%a`) are only letters and are
/// skipped.
fn names(text: &str) -> impl Iterator<Item = (Range<usize>, Name)> {
    text.match_indices('%').filter_map(move |(start, _)| {
        let rest = &text[start + 1..];
        let (name, end) = parse(rest)?;
        Some((start..start + 1 + rest.len() - end.len(), name))
    })
}

/// Parses the name, without `%`, at the start of a text; also returns the rest.
fn parse(text: &str) -> Option<(Name, &str)> {
    if let Some(rest) = text.strip_prefix("arg") {
        return digits(rest).map(|(number, rest)| (Name::Argument(number), rest));
    }
    if let Some(rest) = text.strip_prefix("in") {
        let (number, rest) = digits(rest)?;
        let (part, rest) = digits(rest.strip_prefix('_')?)?;
        return Some((Name::Carried(number, part), rest));
    }
    let (number, rest) = digits(text)?;
    match rest.strip_prefix('#').and_then(digits) {
        Some((part, rest)) => Some((Name::Part(number, part), rest)),
        None => Some((Name::Result(number), rest)),
    }
}

fn digits(text: &str) -> Option<(usize, &str)> {
    let end = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    Some((text[..end].parse().ok()?, &text[end..]))
}
