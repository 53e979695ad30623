//! Finds chat templates next to a tokenizer, where transformers looks for them.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use fsdp_config::DataConfig;
use fsdp_config::input_file::{self, CONFIG_BYTES_MAX};
use fsdp_core::Digest;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::template::ChatTemplate;
use crate::error::DataError;

/// Names, in a list of templates, of the one for conversations without tools and the one for conversations with tools.
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// Sources of templates, by name.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Templates {
    /// Where the templates come from, for errors.
    origin: String,
    sources: BTreeMap<String, String>,
    date: Option<String>,
}

/// Templates that are ready to render.
#[derive(Debug)]
pub(super) struct Compiled {
    plain: ChatTemplate,
    with_tools: Option<ChatTemplate>,
}

impl Templates {
    /// Reads `data.chat_template`, or the files in the tokenizer's folder, or else takes those of its
    /// `tokenizer_config.json`. The templates are not compiled yet, because the data may have no conversations.
    ///
    /// # Errors
    /// If a file exists but cannot be read.
    pub(crate) fn find(
        config: &DataConfig,
        folder: Option<&Path>,
        listed: &Value,
    ) -> Result<Templates, DataError> {
        let date = config.date.clone();
        if let Some(file) = &config.chat_template {
            let source = read(Path::new(file))?.ok_or_else(|| missing(Path::new(file)))?;
            return Ok(Templates { origin: file.clone(), sources: single(source), date });
        }
        let Some(folder) = folder else {
            let origin = format!("tokenizer \"{}\"", config.tokenizer);
            return Ok(Templates { origin, sources: BTreeMap::new(), date });
        };
        let file = folder.join("chat_template.jinja");
        let mut sources: BTreeMap<String, String> = read(&file)?.map(single).unwrap_or_default();
        let with_tools = folder.join("additional_chat_templates").join(format!("{TOOL_USE}.jinja"));
        sources.extend(read(&with_tools)?.map(|source| (TOOL_USE.to_owned(), source)));
        if !sources.is_empty() {
            return Ok(Templates { origin: file.display().to_string(), sources, date });
        }
        let origin = folder.join("tokenizer_config.json").display().to_string();
        Ok(Templates { origin, sources: named(listed), date })
    }

    /// Digest of everything that determines the rendered text.
    pub(crate) fn digest(&self) -> Digest {
        Digest::of(&(&self.sources, &self.date))
    }

    /// An error that names where the templates come from.
    pub(super) fn fault(&self, reason: String) -> DataError {
        DataError::ChatTemplate { origin: self.origin.clone(), reason }
    }

    /// Compiles the templates.
    ///
    /// # Errors
    /// If there is no template, or if it does not compile: line, column and reason.
    pub(super) fn compile(&self) -> Result<Compiled, String> {
        let parse = |name| {
            let source = self.sources.get(name);
            source.map(|source| ChatTemplate::parse(source, self.date.as_deref())).transpose()
        };
        let (plain, with_tools) = (parse(DEFAULT)?, parse(TOOL_USE)?);
        let plain = plain.ok_or_else(|| {
            "it has no chat template, which `messages` need; set data.chat_template to a file with one"
                .to_owned()
        })?;
        Ok(Compiled { plain, with_tools })
    }
}

impl Compiled {
    /// Returns the template for a conversation with or without tools.
    pub(super) fn select(&self, has_tools: bool) -> &ChatTemplate {
        self.with_tools.as_ref().filter(|_| has_tools).unwrap_or(&self.plain)
    }
}

fn single(source: String) -> BTreeMap<String, String> {
    BTreeMap::from([(DEFAULT.to_owned(), source)])
}

/// Returns the templates of a `tokenizer_config.json`: a single one, or a list of named ones.
fn named(value: &Value) -> BTreeMap<String, String> {
    match value {
        Value::String(source) => single(source.clone()),
        Value::Array(items) => {
            let pair = |item: &Value| {
                Some((item["name"].as_str()?.to_owned(), item["template"].as_str()?.to_owned()))
            };
            items.iter().filter_map(pair).collect()
        }
        _ => BTreeMap::new(),
    }
}

/// Returns the text of a file; `None` if it does not exist.
fn read(file: &Path) -> Result<Option<String>, DataError> {
    match input_file::read_text(file, CONFIG_BYTES_MAX) {
        Ok(text) => Ok(Some(text)),
        Err(fault) if fault.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(DataError::Read { key: "data.chat_template", file: file.to_owned(), source }),
    }
}

fn missing(file: &Path) -> DataError {
    DataError::Read {
        key: "data.chat_template",
        file: file.to_owned(),
        source: io::ErrorKind::NotFound.into(),
    }
}

#[cfg(all(test, feature = "tokenizers"))]
mod tests;
