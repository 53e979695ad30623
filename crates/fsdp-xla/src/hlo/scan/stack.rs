//! Values of the same shape, stored as one value.

use std::collections::HashMap;

use super::{Builder, Name, Operation, Shape, Value};

/// Values of the same shape, stored as one value.
#[derive(Clone, Debug)]
pub(super) struct Stack {
    whole: Value,
    element: Shape,
    count: usize,
}

/// The index of a stack element, computed at run time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Index<'a> {
    /// The number of the round.
    pub(super) round: &'a Value,
    /// The element that round 0 accesses, and the distance to that of the next round.
    pub(super) first: usize,
    pub(super) step: isize,
}

impl Stack {
    /// Wraps an existing value as a stack.
    pub(super) fn new(whole: Value, element: Shape, count: usize) -> Self {
        Self { whole, element, count }
    }

    /// Copies values into a stack.
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

    /// Dimensions of one element within the stack.
    fn one(&self) -> Vec<usize> {
        sizes(&self.element, 1, self.count)
    }

    /// The start index for [`Builder::dynamic_slice`].
    fn start(&self, builder: &mut Builder, index: Index<'_>) -> Value {
        let scale = if is_flat(&self.element, self.count) { self.element.len() } else { 1 };
        let step = builder.with_int("multiply", index.round, index.step as i64 * scale as i64);
        builder.with_int("add", &step, (index.first * scale) as i64)
    }

    /// Reads an element.
    pub(super) fn get(&self, builder: &mut Builder, index: Index<'_>) -> Value {
        let start = self.start(builder, index);
        let found = builder.dynamic_slice(&self.whole, &[(0, &start)], &self.one());
        builder.reshape(&found, &self.element.dims)
    }

    /// Reads an element whose index is known at compile time.
    pub(super) fn at(&self, builder: &mut Builder, number: usize) -> Value {
        let one = self.one();
        let mut ranges: Vec<_> = one.iter().map(|&size| 0..size).collect();
        ranges[0] = number * one[0]..(number + 1) * one[0];
        let found = builder.slice(&self.whole, &ranges);
        builder.reshape(&found, &self.element.dims)
    }

    /// Replaces an element.
    pub(super) fn put(&self, builder: &mut Builder, value: &Value, index: Index<'_>) -> Value {
        let one = builder.reshape(value, &self.one());
        let start = self.start(builder, index);
        builder.dynamic_update(&self.whole, &one, &[(0, &start)])
    }
}

/// Whether elements are vectors, which are stored end to end if offsets fit in 32 bits. Otherwise the stack adds a
/// leading dimension, so that the dimensions that a TPU tiles in memory are unchanged.
fn is_flat(element: &Shape, count: usize) -> bool {
    element.dims.len() <= 1 && i32::try_from(element.len() * count).is_ok()
}

/// Dimensions of `some` elements in a stack of `count`.
fn sizes(element: &Shape, some: usize, count: usize) -> Vec<usize> {
    match is_flat(element, count) {
        true => vec![element.len() * some],
        false => std::iter::once(some).chain(element.dims.iter().copied()).collect(),
    }
}

/// The stacks of a program, by the values in them.
#[derive(Default)]
pub(super) struct Stacks {
    places: HashMap<Name, (Stack, usize)>,
}

impl Stacks {
    /// Records that a value is an element of a stack.
    pub(super) fn note(&mut self, name: Name, stack: &Stack, number: usize) {
        self.places.insert(name, (stack.clone(), number));
    }

    /// Finds the stack that holds all of these values at equal distances and that one of the `before` operations
    /// produces; also returns the index of the first value and the distance.
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
