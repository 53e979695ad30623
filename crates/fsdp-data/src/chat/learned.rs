//! Marks by which a record leaves a message out of the loss, although the model sees it.

use fsdp_config::LossOn;
use serde_json::{Map, Value};

use super::conversation::ASSISTANT;

/// The weight of a message in OpenAI's format for fine-tuning: 0 or 1.
const WEIGHT: &str = "weight";

/// Axolotl's keys, which are booleans.
const FLAGS: [&str; 2] = ["train", "training"];

/// Axolotl's key for parts of a message.
const PARTS: &str = "train_detail";

/// Returns whether a message is marked to count in the loss; `None` if it has no marks.
///
/// # Errors
/// For marks that make no sense.
pub(super) fn mark(message: &Map<String, Value>) -> Result<Option<bool>, String> {
    let weight = message.get(WEIGHT).map(|weight| match weight.as_f64() {
        Some(0.0) => Ok(false),
        Some(1.0) => Ok(true),
        _ => Err(format!("has \"{WEIGHT}\": {weight}, but a message counts in full (1) or not at all (0)")),
    });
    let flags = FLAGS.iter().filter_map(|&key| Some((key, message.get(key)?)));
    let flags = flags.map(|(key, flag)| {
        flag.as_bool().ok_or_else(|| format!("has \"{key}\": {flag}, which is neither true nor false"))
    });
    let marks: Vec<bool> = weight.into_iter().chain(flags).collect::<Result<_, _>>()?;
    if message.get(PARTS).is_some_and(|parts| parts.as_array().is_none_or(|parts| !parts.is_empty())) {
        return Err(format!(
            "has \"{PARTS}\", but only whole messages can be left out; use \"{}\": false",
            FLAGS[0]
        ));
    }
    Ok((!marks.is_empty()).then(|| !marks.contains(&false)))
}

/// Checks that a mark can be followed. Either what the assistant says counts in the loss, or everything, of which an
/// answer can be left out.
///
/// # Errors
/// A description of why it cannot.
pub(super) fn check(mark: Option<bool>, role: &str, loss_on: LossOn) -> Result<(), String> {
    let (marked, advice) = match (mark, loss_on) {
        (Some(false), LossOn::All) => ("not to count", "give data.loss_on another value"),
        (Some(true), LossOn::Answers | LossOn::LastAnswer) => {
            ("to count", "count everything: data.loss_on = \"all\"")
        }
        _ => return Ok(()),
    };
    match role {
        ASSISTANT => Ok(()),
        _ => Err(format!(
            "(of role \"{role}\") is marked {marked} in the loss, but only what the assistant says can be chosen; remove \
             the mark, or {advice}"
        )),
    }
}

#[cfg(test)]
mod tests;
