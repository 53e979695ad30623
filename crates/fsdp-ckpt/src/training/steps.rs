//! Step counts: those that an optimizer keeps for every parameter, and those of the trainer.

use crate::checkpoint::{Checkpoint, Key, Value};

/// The last steps of the names under which trainers store their progress.
const RUN_COUNTS: [&str; 4] = ["global_step", "global_steps", "step", "steps"];

/// A step count.
#[derive(Clone, Debug, PartialEq)]
pub struct Count {
    /// Name in the checkpoint.
    pub name: String,
    /// The count; `None` if it is stored in a tensor.
    pub(super) value: Option<f64>,
}

impl Count {
    /// Returns the count of this name. `None` if it is neither a tensor nor a number.
    pub(super) fn of(checkpoint: &Checkpoint, name: &str) -> Option<Count> {
        let value = checkpoint.values.get(name).map(|object| number(&object.value));
        match value {
            Some(value) => Some(Count { name: name.to_owned(), value: Some(value?) }),
            None => {
                checkpoint.tensors.contains_key(name).then(|| Count { name: name.to_owned(), value: None })
            }
        }
    }

    /// Returns the trainer's own step count. `None` if it stores none.
    pub(super) fn of_run(checkpoint: &Checkpoint) -> Option<Count> {
        let facts = checkpoint.run_state.iter().filter(|(key, _)| RUN_COUNTS.contains(&key.as_str()));
        let mut facts = facts
            .filter_map(|(key, text)| Some(Count { name: key.clone(), value: Some(text.parse().ok()?) }));
        let tensors = checkpoint.tensors.iter().map(|(name, tensor)| (name, &tensor.path));
        let values = checkpoint.values.iter().map(|(name, object)| (name, &object.path));
        let mut named = tensors.chain(values).filter(|(_, path)| is_run_count(path));
        named.find_map(|(name, _)| Count::of(checkpoint, name)).or_else(|| facts.next())
    }
}

/// Whether a path leads to a trainer's step count.
pub(super) fn is_run_count(path: &[Key]) -> bool {
    let text = |key: &Key| match key {
        Key::Name(name) => name.clone(),
        Key::Index(_) => String::new(),
    };
    match path {
        [only] => RUN_COUNTS.contains(&text(only).as_str()),
        [first, last] => text(first) == "train_state" && RUN_COUNTS.contains(&text(last).as_str()),
        _ => false,
    }
}

fn number(value: &Value) -> Option<f64> {
    match value {
        #[expect(clippy::cast_precision_loss, reason = "no run does 2^53 steps")]
        Value::Int(number) => Some(*number as f64),
        Value::Float(number) => Some(*number),
        _ => None,
    }
}
