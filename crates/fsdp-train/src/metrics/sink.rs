//! What outputs besides `metrics.jsonl` receive.

use std::io;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

/// A number of a step or an evaluation, with its name in `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Figure {
    pub(super) name: String,
    /// The value; NaN if it was not finite.
    pub(super) value: f64,
}

/// Returns all numbers of a line of `metrics.jsonl` except its step, in order.
pub(super) fn figures(line: &impl Serialize) -> Vec<Figure> {
    let Ok(Value::Object(line)) = serde_json::to_value(line) else { unreachable!("lines are objects") };
    let figure = |(name, value): (String, Value)| {
        let value = if value.is_null() { Some(f64::NAN) } else { value.as_f64() };
        value.filter(|_| name != "step").map(|value| Figure { name, value })
    };
    line.into_iter().filter_map(figure).collect()
}

/// An output besides `metrics.jsonl` with the same figures in another format.
pub(super) trait Sink: Send {
    /// The path to name in errors.
    fn path(&self) -> &Path;

    /// Writes the figures of a step.
    ///
    /// # Errors
    /// If they cannot be written.
    fn step(&mut self, step: u64, figures: &[Figure]) -> io::Result<()>;

    /// Writes the figures of an evaluation of a set after `step` steps.
    ///
    /// # Errors
    /// If they cannot be written.
    fn evaluation(&mut self, step: u64, set: &str, figures: &[Figure]) -> io::Result<()>;
}
