//! Replaces chat templates in a build without a template engine.

use serde::Serialize;
use serde_json::Value;

use super::fault::RenderFault;
use super::rendered::Rendered;

/// A value for a template engine.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Prepared;

/// Leaves a value out.
pub(super) fn prepare(_json: &Value) -> Prepared {
    Prepared
}

/// A chat template, of which there are none in this build.
#[derive(Debug)]
pub(crate) enum ChatTemplate {}

impl ChatTemplate {
    /// # Errors
    /// Always.
    pub(crate) fn parse(_source: &str, _date: Option<&str>) -> Result<ChatTemplate, String> {
        Err("this fsdp was built without chat templates; build it with `--features tokenizers`".to_owned())
    }

    pub(crate) fn has_generation(&self) -> bool {
        match *self {}
    }

    pub(crate) fn render(&self, _context: &impl Serialize) -> Result<Rendered, RenderFault> {
        match *self {}
    }
}
