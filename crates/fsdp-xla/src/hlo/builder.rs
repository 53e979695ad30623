//! A program under construction.

use std::fmt::{self, Write};

use super::collectives::Collective;
use super::operation::{self, Operation};
use super::types::{Element, Shape, Value};

/// A program under construction.
#[derive(Clone, Default)]
pub(crate) struct Builder {
    pub(super) operations: Vec<Operation>,
    /// The number of the next operation. Results are named by the numbers of their operations.
    pub(super) next: usize,
    /// Number of collectives added so far.
    pub(super) collectives: usize,
}

impl Builder {
    /// The text of the operations so far.
    pub(crate) fn body(&self) -> String {
        operation::lines(&self.operations)
    }

    /// Number of operations, including those within loops.
    pub(crate) fn operations(&self) -> usize {
        self.operations.iter().map(Operation::count).sum()
    }

    /// The collectives so far, in order.
    pub(crate) fn collectives(&self) -> Vec<Collective> {
        self.operations.iter().flat_map(Operation::collectives).cloned().collect()
    }

    /// Adds an operation with one result.
    pub(super) fn push(&mut self, shape: Shape, text: fmt::Arguments<'_>) -> Value {
        self.push_all(vec![shape], Vec::new(), text.to_string()).swap_remove(0)
    }

    /// Adds an operation; returns its results.
    pub(super) fn push_all(
        &mut self,
        shapes: Vec<Shape>,
        collectives: Vec<Collective>,
        text: String,
    ) -> Vec<Value> {
        let operation = Operation::new(self.next, shapes, collectives, text);
        self.next += 1;
        let results = operation.results();
        self.operations.push(operation);
        results
    }

    /// A tensor filled with a float.
    pub(crate) fn float(&mut self, value: f64, dims: &[usize], element: Element) -> Value {
        let shape = Shape::new(dims, element);
        let bits = bits(value, element);
        self.push(shape.clone(), format_args!("stablehlo.constant dense<{bits}> : {shape}"))
    }

    /// A constant vector of floats.
    pub(crate) fn floats(&mut self, values: &[f64], element: Element) -> Value {
        let shape = Shape::new(&[values.len()], element);
        let all = list(values.iter().map(|&value| bits(value, element)));
        self.push(shape.clone(), format_args!("stablehlo.constant dense<[{all}]> : {shape}"))
    }

    /// A tensor filled with an integer.
    pub(crate) fn int(&mut self, value: i64, dims: &[usize], element: Element) -> Value {
        let shape = Shape::new(dims, element);
        self.push(shape.clone(), format_args!("stablehlo.constant dense<{value}> : {shape}"))
    }

    /// A tensor of zeros.
    pub(crate) fn zeros(&mut self, dims: &[usize], element: Element) -> Value {
        if element.is_float() { self.float(0.0, dims, element) } else { self.int(0, dims, element) }
    }

    /// Returns `value`, made to depend on `other`.
    pub(crate) fn after(&mut self, value: &Value, other: &Value) -> Value {
        self.barrier(&[value.clone(), other.clone()]).swap_remove(0)
    }

    /// Returns the values, each made to depend on all of them.
    pub(crate) fn barrier(&mut self, values: &[Value]) -> Vec<Value> {
        let names = list(values.iter().map(|value| value.name));
        let shapes = list(values.iter().map(|value| &value.shape));
        let result_shapes = values.iter().map(|value| value.shape.clone()).collect();
        self.push_all(result_shapes, Vec::new(), format!("stablehlo.optimization_barrier {names} : {shapes}"))
    }
}

/// Formats a float as its bits, which is exact.
fn bits(value: f64, element: Element) -> String {
    match element {
        Element::F64 => format!("0x{:016X}", value.to_bits()),
        Element::Bf16 => format!("0x{:04X}", half::bf16::from_f64(value).to_bits()),
        Element::F16 => format!("0x{:04X}", half::f16::from_f64(value).to_bits()),
        _ => format!("0x{:08X}", (value as f32).to_bits()),
    }
}

/// Joins items with commas.
pub(crate) fn list<T: fmt::Display>(items: impl IntoIterator<Item = T>) -> String {
    let mut text = String::new();
    for item in items {
        let comma = if text.is_empty() { "" } else { ", " };
        let _ = write!(text, "{comma}{item}");
    }
    text
}
