//! Values of one shape, stored as one value.

use std::collections::HashMap;

use super::{Builder, Name, Operation, Shape, Value};

/// Values of one shape, stored as one value.
#[derive(Clone, Debug)]
pub(super) struct Stack {
    whole: Value,
    element: Shape,
    count: usize,
}

/// An element of a stack, by a number that is known when the program runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Index<'a> {
    /// The number of a round.
    pub(super) round: &'a Value,
    /// The element of round 0, and how much further on that of the next one is.
    pub(super) first: usize,
    pub(super) step: isize,
}

impl Stack {
    /// A stack over a value that is there.
    pub(super) fn new(whole: Value, element: Shape, count: usize) -> Self {
        Self { whole, element, count }
    }

    /// A copy of values.
    pub(super) fn of(builder: &mut Builder, values: &[Value]) -> Self {
        let (element, count) = (values[0].shape.clone(), values.len());
        let one = sizes(&element, 1, count);
        let parts: Vec<Value> = values.iter().map(|value| builder.reshape(value, &one)).collect();
        Self { whole: builder.concatenate(&parts, 0), element, count }
    }

    /// The value of a stack of zeros, to be overwritten.
    pub(super) fn zeros(builder: &mut Builder, element: &Shape, count: usize) -> Value {
        builder.zeros(&sizes(element, count, count), element.element)
    }

    /// Sizes of one element in the stack.
    fn one(&self) -> Vec<usize> {
        sizes(&self.element, 1, self.count)
    }

    /// What [`Builder::dynamic_slice`] begins with.
    fn start(&self, builder: &mut Builder, index: Index<'_>) -> Value {
        let scale = if is_flat(&self.element, self.count) { self.element.len() } else { 1 };
        let step = builder.with_int("multiply", index.round, index.step as i64 * scale as i64);
        builder.with_int("add", &step, (index.first * scale) as i64)
    }

    /// An element.
    pub(super) fn get(&self, builder: &mut Builder, index: Index<'_>) -> Value {
        let start = self.start(builder, index);
        let found = builder.dynamic_slice(&self.whole, &[(0, &start)], &self.one());
        builder.reshape(&found, &self.element.dims)
    }

    /// An element whose number is known now.
    pub(super) fn at(&self, builder: &mut Builder, number: usize) -> Value {
        let one = self.one();
        let mut ranges: Vec<_> = one.iter().map(|&size| 0..size).collect();
        ranges[0] = number * one[0]..(number + 1) * one[0];
        let found = builder.slice(&self.whole, &ranges);
        builder.reshape(&found, &self.element.dims)
    }

    /// The stack with another element.
    pub(super) fn put(&self, builder: &mut Builder, value: &Value, index: Index<'_>) -> Value {
        let one = builder.reshape(value, &self.one());
        let start = self.start(builder, index);
        builder.dynamic_update(&self.whole, &one, &[(0, &start)])
    }
}

/// Whether elements are vectors, laid end to end, which needs offsets that fit in 32 bits. Others get a dimension for the stack, in
/// front, so that those in which a TPU tiles memory stay as they are.
fn is_flat(element: &Shape, count: usize) -> bool {
    element.dims.len() <= 1 && i32::try_from(element.len() * count).is_ok()
}

/// Sizes of some elements in a stack of so many.
fn sizes(element: &Shape, some: usize, count: usize) -> Vec<usize> {
    match is_flat(element, count) {
        true => vec![element.len() * some],
        false => std::iter::once(some).chain(element.dims.iter().copied()).collect(),
    }
}

/// The stacks of a program, by the values that are in them.
#[derive(Default)]
pub(super) struct Stacks {
    places: HashMap<Name, (Stack, usize)>,
}

impl Stacks {
    /// Notes that a value is an element of a stack.
    pub(super) fn note(&mut self, name: Name, stack: &Stack, number: usize) {
        self.places.insert(name, (stack.clone(), number));
    }

    /// The stack that has all of these values at equal distances, if it is made by one of these operations; with the number of the
    /// first value and the distance.
    pub(super) fn find(&self, values: &[Value], before: &[Operation]) -> Option<(Stack, usize, isize)> {
        let places: Vec<&(Stack, usize)> =
            values.iter().map(|value| self.places.get(&value.name)).collect::<Option<_>>()?;
        let (stack, first) = places[0];
        let step = places[1].1 as isize - *first as isize;
        let is_next = |(round, (other, number)): (usize, &&(Stack, usize))| {
            other.whole.name == stack.whole.name
                && *number as isize == *first as isize + step * round as isize
        };
        let is_there = || before.iter().any(|one| Some(one.number()) == stack.whole.name.number());
        (places.iter().enumerate().all(is_next) && is_there()).then(|| (stack.clone(), *first, step))
    }
}
