//! The files next to a `tokenizer.json`: `tokenizer_config.json`, read as transformers reads it.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use fsdp_config::input_file::{self, TOKENIZER_BYTES_MAX};
use serde_json::{Map, Value};

use super::added::AddedToken;
use super::class::Class;
use super::fault::{Source, TokenizerFault};

/// Roles of tokens, in the order in which transformers registers them.
const ROLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The role of the token that ends a text.
pub(super) const EOS: &str = "eos_token";

/// The role of the token for what the vocabulary lacks.
#[cfg(feature = "tokenizers")]
pub(super) const UNKNOWN: &str = "unk_token";

/// Keys for further special tokens; the second is the older name.
const EXTRA: &str = "extra_special_tokens";
const OLD_EXTRA: &str = "additional_special_tokens";

/// The key under which transformers saves the tokens with roles specific to a model, which it reads only if no others have one.
const SPECIFIC: &str = "model_specific_special_tokens";

/// What says that an object is a token.
const TYPE: &str = "__type";
const TOKEN: &str = "AddedToken";

/// The key for added tokens, by id.
const DECODER: &str = "added_tokens_decoder";

/// The configuration file, and the files in which older tokenizers keep special tokens and added tokens.
const CONFIG: &str = "tokenizer_config.json";
const MAP: &str = "special_tokens_map.json";
const ADDED: &str = "added_tokens.json";

/// Model files that name the tokens that end a text, in the order in which transformers prefers them.
const MODEL: [&str; 2] = ["generation_config.json", MODEL_CONFIG];

/// The configuration of the model, which may determine the class.
const MODEL_CONFIG: &str = "config.json";

/// The contents of a `tokenizer_config.json`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct TokenizerConfig {
    /// Tokens by role, under the names that chat templates use.
    pub(super) roles: Map<String, Value>,
    /// What determines the tokens of a text besides the `tokenizer.json`.
    pub(super) rules: Rules,
    /// The value of `chat_template`.
    pub(super) chat_template: Value,
    /// `truncation_side`.
    pub(super) truncation_side: Option<String>,
    /// The token that ends a text according to the model files, if no token has that role.
    pub(super) eos_id: Option<u32>,
    /// The tokens that end a generated text according to the model files.
    pub(super) stop_ids: Vec<u32>,
}

/// What determines the tokens of a text besides the `tokenizer.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Rules {
    /// The class that builds the tokenizer from parts of the file; `None` if it is used as it is.
    pub(super) class: Option<Class>,
    /// Tokens by id, which replace those of the same text in the `tokenizer.json`.
    pub(super) added: BTreeMap<u64, AddedToken>,
    /// Whether these tokens are all that transformers reads, rather than in addition to those of the `tokenizer.json`.
    pub(super) is_complete: bool,
    /// Tokens with a role, which must be known and are special.
    pub(super) named: Vec<AddedToken>,
    /// Further tokens that must be known.
    pub(super) extra: Vec<AddedToken>,
    /// `split_special_tokens`: whether special tokens in a text are read as text.
    pub(super) splits_special: bool,
}

impl TokenizerConfig {
    /// Reads the files next to a `tokenizer.json`, all of which are optional.
    ///
    /// # Errors
    /// If a file exists but cannot be read, or is not a JSON object; [`TokenizerFault`] for settings that are not supported.
    pub(super) fn read_next_to(tokenizer: &Path) -> Result<TokenizerConfig, Source> {
        let folder = tokenizer.parent().unwrap_or(Path::new(""));
        let mut fields = read(&folder.join(CONFIG))?;
        let mut ids = Map::new();
        if !fields.contains_key(DECODER) {
            merge(&mut fields, read(&folder.join(MAP))?);
            ids = read(&folder.join(ADDED))?;
        }
        let model = read(&folder.join(MODEL_CONFIG)).unwrap_or_default();
        let mut config = TokenizerConfig::of(fields, &ids, &model)?;
        let stop_ids = MODEL.iter().find_map(|name| stop_ids(&read(&folder.join(name)).ok()?));
        config.stop_ids = stop_ids.unwrap_or_default();
        if !config.roles.contains_key(EOS) {
            config.eos_id = config.stop_ids.first().copied();
        }
        Ok(config)
    }

    fn of(
        mut fields: Map<String, Value>,
        ids: &Map<String, Value>,
        model: &Map<String, Value>,
    ) -> Result<TokenizerConfig, TokenizerFault> {
        let is_set = |key: &str| fields.get(key).is_some_and(|value| *value == Value::Bool(true));
        if is_set("fix_mistral_regex") {
            return Err(TokenizerFault::MistralRegex);
        }
        let splits_special = is_set("split_special_tokens");
        let class = Class::find(&fields, model)?;
        for (role, token) in class.map(Class::roles).unwrap_or_default() {
            fields.entry(*role).or_insert_with(|| Value::from(*token));
        }
        let (roles, named, extra) = special_tokens(&mut fields);
        let is_special =
            |text: &str| named.iter().chain(&extra).any(|token: &AddedToken| token.content == text);
        let of_file = ids.iter().filter_map(|(text, id)| {
            let token = AddedToken {
                normalized: !is_special(text),
                special: is_special(text),
                ..AddedToken::special(text)
            };
            Some((id.as_u64()?, token))
        });
        let decoder = fields.get(DECODER).and_then(Value::as_object);
        let of_config = decoder
            .into_iter()
            .flatten()
            .filter_map(|(id, token)| Some((id.parse::<u64>().ok()?, AddedToken::of(token)?)));
        let added = of_file.chain(of_config).collect();
        let rules = Rules { class, added, is_complete: decoder.is_some(), named, extra, splits_special };
        let truncation_side = fields.get("truncation_side").and_then(Value::as_str).map(str::to_owned);
        let chat_template = fields.remove("chat_template").unwrap_or_default();
        let stop_ids = Vec::new();
        Ok(TokenizerConfig { roles, rules, chat_template, truncation_side, eos_id: None, stop_ids })
    }
}

/// Returns the tokens by role, the same in order, and further special tokens.
fn special_tokens(fields: &mut Map<String, Value>) -> (Map<String, Value>, Vec<AddedToken>, Vec<AddedToken>) {
    let mut roles: Map<String, Value> = Map::new();
    let mut named = Vec::new();
    let old = fields.remove(OLD_EXTRA);
    let extra = fields.remove(EXTRA).or(old);
    // Roles specific to a model, such as `image_token`, are among the other roles or in a separate object. Among the
    // others, transformers takes an object for a token only if it says so, and reads it before the texts.
    let others =
        || fields.iter().filter(|(name, _)| name.ends_with("_token") && !ROLES.contains(&name.as_str()));
    let typed = others().filter(|(_, token)| token[TYPE] == TOKEN);
    let texts = others().filter(|(_, token)| token.is_string());
    let extra_roles = extra.as_ref().and_then(Value::as_object).into_iter().flatten();
    let specific: Vec<(&String, &Value)> = texts.chain(extra_roles).collect();
    let saved = fields.get(SPECIFIC).and_then(Value::as_object).filter(|_| specific.is_empty());
    let known = ROLES.iter().filter_map(|&role| Some((role, fields.get(role)?)));
    let others = typed.chain(specific).chain(saved.into_iter().flatten());
    for (role, token) in known.chain(others.map(|(role, token)| (role.as_str(), token))) {
        if let Some(token) = AddedToken::of(token) {
            roles.insert(role.to_owned(), token.content.clone().into());
            named.push(AddedToken { special: true, ..token });
        }
    }
    let listed = extra.as_ref().and_then(Value::as_array).into_iter().flatten();
    (roles, named, listed.filter_map(AddedToken::of).collect())
}

/// Adds the fields of a `special_tokens_map.json`, whose tokens are all special. Lists of further tokens are joined.
fn merge(fields: &mut Map<String, Value>, map: Map<String, Value>) {
    let special = |mut value: Value| {
        if let Value::Object(token) = &mut value {
            token.insert("special".to_owned(), true.into());
            token.insert(TYPE.to_owned(), TOKEN.into());
        }
        value
    };
    for (key, value) in map {
        match (&*key, value) {
            (OLD_EXTRA, value) => {
                fields.entry(OLD_EXTRA).or_insert(value);
            }
            (EXTRA, Value::Array(tokens)) => {
                let old = fields.remove(OLD_EXTRA);
                let listed = fields.remove(EXTRA).or(old).unwrap_or_default();
                let mut all = listed.as_array().cloned().unwrap_or_default();
                all.extend(tokens.into_iter().map(special));
                fields.insert(key, all.into());
            }
            (EXTRA, value) => drop(fields.insert(key, value)),
            (_, value) => drop(fields.insert(key, special(value))),
        }
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
