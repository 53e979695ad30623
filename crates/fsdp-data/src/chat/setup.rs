//! Everything besides a conversation that its [script](super::script::Script) depends on.

use fsdp_config::LossOn;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::templates::Templates;

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
