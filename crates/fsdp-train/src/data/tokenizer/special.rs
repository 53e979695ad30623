//! The files next to a `tokenizer.json`: `tokenizer_config.json`, read as transformers reads it.

use std::io;
use std::path::Path;

use serde_json::{Map, Value};

use super::fault::Source;
use crate::input_file::{self, TOKENIZER_BYTES_MAX};

/// Roles of tokens, in the order in which transformers registers them.
const ROLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The role of the token that ends a text.
pub(super) const EOS: &str = "eos_token";

/// Keys for further special tokens; the second is the older name.
const EXTRA: [&str; 2] = ["extra_special_tokens", "additional_special_tokens"];

/// The configuration file, and the file in which older tokenizers keep special tokens.
const CONFIG: &str = "tokenizer_config.json";
const MAP: &str = "special_tokens_map.json";

/// Model files that name the tokens that end a text, in the order in which transformers prefers them.
const MODEL: [&str; 2] = ["generation_config.json", "config.json"];

/// The contents of a `tokenizer_config.json`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct TokenizerConfig {
    /// Tokens by role, under the names that chat templates use.
    pub(super) roles: Map<String, Value>,
    /// Tokens that must be known, even if the `tokenizer.json` lacks them.
    pub(super) special: Vec<SpecialToken>,
    /// The value of `chat_template`.
    pub(super) chat_template: Value,
    /// `truncation_side`.
    pub(super) truncation_side: Option<String>,
    /// The token that ends a text according to the model files, if no token has that role.
    pub(super) eos_id: Option<u32>,
    /// The tokens that end a generated text according to the model files.
    pub(super) stop_ids: Vec<u32>,
}

/// A token that is matched in text before any other processing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SpecialToken {
    /// Text of the token.
    pub(super) content: String,
    /// Whether the token includes white space before it, and after it.
    pub(super) strips: [bool; 2],
    /// Whether it only matches as a separate word.
    pub(super) single_word: bool,
}

impl TokenizerConfig {
    /// Reads the files next to a `tokenizer.json`, all of which are optional.
    ///
    /// # Errors
    /// If a file exists but cannot be read, or is not a JSON object.
    pub(super) fn read_next_to(tokenizer: &Path) -> Result<TokenizerConfig, Source> {
        let folder = tokenizer.parent().unwrap_or(Path::new(""));
        let mut fields = read(&folder.join(CONFIG))?;
        if !fields.contains_key("added_tokens_decoder") {
            fields.extend(read(&folder.join(MAP))?);
        }
        let mut config = TokenizerConfig::of(fields);
        let stop_ids = MODEL.iter().find_map(|name| stop_ids(&read(&folder.join(name)).ok()?));
        config.stop_ids = stop_ids.unwrap_or_default();
        if !config.roles.contains_key(EOS) {
            config.eos_id = config.stop_ids.first().copied();
        }
        Ok(config)
    }

    fn of(mut fields: Map<String, Value>) -> TokenizerConfig {
        let mut roles: Map<String, Value> = Map::new();
        let mut special = Vec::new();
        let extra = EXTRA.iter().find_map(|name| fields.remove(*name));
        // Roles specific to a model, such as `image_token`, are in a separate object or among the other roles.
        let extra_roles = extra.as_ref().and_then(Value::as_object).into_iter().flatten();
        let others =
            fields.iter().filter(|(name, _)| name.ends_with("_token") && !ROLES.contains(&name.as_str()));
        let known = ROLES.iter().filter_map(|&role| Some((role, fields.get(role)?)));
        for (role, token) in
            known.chain(others.chain(extra_roles).map(|(role, token)| (role.as_str(), token)))
        {
            if let Some(token) = SpecialToken::of(token) {
                roles.insert(role.to_owned(), token.content.clone().into());
                special.push(token);
            }
        }
        special.extend(
            extra.as_ref().and_then(Value::as_array).into_iter().flatten().filter_map(SpecialToken::of),
        );
        let truncation_side = fields.get("truncation_side").and_then(Value::as_str).map(str::to_owned);
        let chat_template = fields.remove("chat_template").unwrap_or_default();
        TokenizerConfig { roles, special, chat_template, truncation_side, eos_id: None, stop_ids: Vec::new() }
    }
}

impl SpecialToken {
    /// Reads a token from its text, or from an object with its text.
    fn of(value: &Value) -> Option<SpecialToken> {
        let content = value.as_str().or_else(|| value["content"].as_str()).filter(|text| !text.is_empty())?;
        let flag = |name: &str| value[name].as_bool().unwrap_or(false);
        let strips = [flag("lstrip"), flag("rstrip")];
        Some(SpecialToken { content: content.to_owned(), strips, single_word: flag("single_word") })
    }
}

/// Returns the tokens that end a text, of which there may be one or a list.
fn stop_ids(fields: &Map<String, Value>) -> Option<Vec<u32>> {
    let id = |id: &Value| u32::try_from(id.as_u64()?).ok();
    match fields.get("eos_token_id")? {
        Value::Array(ids) if !ids.is_empty() => ids.iter().map(id).collect(),
        one => Some(vec![id(one)?]),
    }
}

fn read(file: &Path) -> Result<Map<String, Value>, Source> {
    let explained = |fault: &dyn std::fmt::Display| format!("{} next to it: {fault}", file.display());
    match input_file::read_text(file, TOKENIZER_BYTES_MAX) {
        Err(fault) if fault.kind() == io::ErrorKind::NotFound => Ok(Map::new()),
        Err(fault) => Err(explained(&fault).into()),
        Ok(text) => serde_json::from_str(&text).map_err(|fault| explained(&fault).into()),
    }
}

#[cfg(test)]
mod tests;
