//! Everything besides a conversation that its [script](Script) depends on.

use fsdp_config::LossOn;
use serde::{Deserialize, Serialize};
use serde_json::{Deserializer, Map, Value};

use super::TOOLS;
use super::conversation::Conversation;
use super::fault::ScriptFault;
use super::script::Script;
use super::templates::{Compiled, Templates};

/// See the module.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Setup {
    /// The templates.
    pub(super) templates: Templates,
    /// Special tokens by their roles, which templates see.
    pub(super) special: Map<String, Value>,
    /// The tokens at which generation stops.
    pub(super) stops: Vec<String>,
    /// Which tokens count in the loss.
    pub(super) loss_on: LossOn,
    /// Whether reasoning counts as answers do.
    pub(super) counts_reasoning: bool,
}

impl Setup {
    /// Returns the script of a conversation, which is given as JSON, by the compiled templates.
    ///
    /// # Errors
    /// [`ScriptFault`].
    pub(super) fn script(&self, compiled: &Compiled, conversation: &[u8]) -> Result<Script, ScriptFault> {
        let mut json = Deserializer::from_slice(conversation);
        // This program has written it. JSON strings within were parsed, so it may nest deeper than what can be read.
        json.disable_recursion_limit();
        let conversation = Conversation::deserialize(&mut json);
        let conversation = conversation.map_err(|fault| ScriptFault::Record(fault.to_string()))?;
        let template = compiled.select(conversation.context.contains_key(TOOLS));
        Script::of(&conversation, template, self)
    }
}
