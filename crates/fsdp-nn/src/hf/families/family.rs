//! What the table of families has of each.

use std::fmt;
use std::sync::Arc;

use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::hf::sizes::Sizes;

/// A family of models: how to parse its `config.json`, and which tensors its files contain beside parameters.
pub struct Family {
    /// `model_type` of its `config.json`.
    pub model_type: &'static str,
    /// The transformers class, as listed in `architectures`.
    pub class: &'static str,
    /// The transformers class of the model without its head.
    pub base_class: &'static str,
    /// The family's peculiarities, in one sentence.
    pub about: &'static str,
    /// The prefix of tensor names that files of [`Family::base_class`] omit.
    pub base_prefix: &'static str,
    /// Name suffixes of tensors that older versions saved although they are constants.
    pub constants: &'static [&'static str],
    /// Parses the keys, and refuses unknown values.
    pub(in crate::hf) parse: fn(Keys<'_>) -> Result<Arc<dyn Sizes>, ConfigError>,
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type)
    }
}
