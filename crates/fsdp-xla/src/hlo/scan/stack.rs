//! Values of the same shape, stored as one value.

use std::ops::Range;

use crate::hlo::{Builder, Name, Shape, Value};

/// Values of the same shape, stored as one value.
#[derive(Clone, Debug)]
pub(super) struct Stack {
    pub(super) value: Value,
    pub(super) element: Shape,
    pub(super) count: usize,
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
    /// Copies values into a stack: single elements, or several as [`Stack::part`] returns them.
    pub(super) fn of(builder: &mut Builder, parts: &[Value], element: &Shape) -> Self {
        let count = parts.iter().map(Value::len).sum::<usize>() / element.len();
        let dims = |part: &Value| sizes(element, part.len() / element.len(), count);
        let parts: Vec<Value> = parts.iter().map(|part| builder.reshape(part, &dims(part))).collect();
        Self { value: builder.concatenate(&parts, 0), element: element.clone(), count }
    }

    /// Reads several elements, in reverse order if asked.
    pub(super) fn part(&self, builder: &mut Builder, range: Range<usize>, is_reversed: bool) -> Value {
        let sizes = self.element_sizes();
        let mut ranges: Vec<_> = sizes.iter().map(|&size| 0..size).collect();
        ranges[0] = range.start * sizes[0]..range.end * sizes[0];
        let found = builder.slice(&self.value, &ranges);
        if !is_reversed {
            return found;
        }
        let rows = builder.reshape(&found, &[range.len(), self.element.len()]);
        builder.reverse(&rows, 0)
    }

    /// A stack of zeros, to be overwritten.
    pub(super) fn zeros(builder: &mut Builder, element: &Shape, count: usize) -> Self {
        let value = builder.zeros(&sizes(element, count, count), element.element);
        Self { value, element: element.clone(), count }
    }

    /// A stack with this name.
    pub(super) fn named(name: Name, element: &Shape, count: usize) -> Self {
        let shape = Shape::new(&sizes(element, count, count), element.element);
        Self { value: Value { name, shape }, element: element.clone(), count }
    }

    /// Dimensions of one element within the stack.
    fn element_sizes(&self) -> Vec<usize> {
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
        let found = builder.dynamic_slice(&self.value, &[(0, &start)], &self.element_sizes());
        builder.reshape(&found, &self.element.dims)
    }

    /// Reads an element whose index is known at compile time.
    pub(super) fn at(&self, builder: &mut Builder, number: usize) -> Value {
        let found = self.part(builder, number..number + 1, false);
        builder.reshape(&found, &self.element.dims)
    }

    /// Replaces an element.
    pub(super) fn put(&self, builder: &mut Builder, value: &Value, index: Index<'_>) -> Value {
        let element = builder.reshape(value, &self.element_sizes());
        let start = self.start(builder, index);
        builder.dynamic_update(&self.value, &element, &[(0, &start)])
    }

    /// Replaces an element whose index is known at compile time.
    pub(super) fn put_at(&self, builder: &mut Builder, value: &Value, number: usize) -> Self {
        let element = builder.reshape(value, &self.element_sizes());
        let mut starts = vec![0; element.dims().len()];
        starts[0] = number * element.dims()[0];
        Self { value: builder.update(&self.value, &element, &starts), ..self.clone() }
    }
}

/// Whether elements are vectors, which are stored end to end if offsets fit in 32 bits. Otherwise the stack adds a
/// leading dimension, so that the dimensions that a TPU tiles in memory are unchanged.
fn is_flat(element: &Shape, count: usize) -> bool {
    element.dims.len() <= 1 && i32::try_from(element.len() * count).is_ok()
}

/// Dimensions of `elements` elements in a stack of `count`.
fn sizes(element: &Shape, elements: usize, count: usize) -> Vec<usize> {
    match is_flat(element, count) {
        true => vec![element.len() * elements],
        false => std::iter::once(elements).chain(element.dims.iter().copied()).collect(),
    }
}
