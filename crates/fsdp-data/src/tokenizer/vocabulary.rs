//! A `tokenizer.json`, read by Hugging Face's library.

use std::collections::{BTreeMap, HashSet};

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{ModelWrapper, TruncationDirection};

use super::added::AddedToken;
use super::class::Class;
use super::fault::{Source, TokenizerFault};
use super::hostile;
use super::special::{Rules, TokenizerConfig, UNKNOWN};
use super::{Encoded, Ends};

/// A text that every tokenizer can encode, used to find the tokens added around a text.
const ANY_TEXT: &str = "a";

/// The vocabulary of a `tokenizer.json`, and the rules for encoding text.
#[derive(Clone, Debug)]
pub(super) struct Vocabulary {
    library: Box<tokenizers::Tokenizer>,
    truncates_left: bool,
}

impl Vocabulary {
    /// Parses a `tokenizer.json`, and applies the configuration next to it. Truncation and padding that the file may request
    /// are disabled, because packing takes care of them.
    ///
    /// # Errors
    /// If the text is not a tokenizer, or would need far more memory than its size.
    pub(super) fn parse(text: &str, config: &TokenizerConfig) -> Result<Vocabulary, Source> {
        hostile::guarded(|| {
            hostile::check(text)?;
            let unknown = config.roles.get(UNKNOWN).and_then(Value::as_str);
            let rules = &config.rules;
            let mut library: tokenizers::Tokenizer = match rules.class {
                Some(class) => class.rebuild(text, unknown)?.parse()?,
                None => text.parse()?,
            };
            if let ModelWrapper::BPE(model) = library.get_model()
                && let Some(dropout) = model.dropout.filter(|&dropout| dropout > 0.0)
            {
                return Err(TokenizerFault::Dropout { dropout }.into());
            }
            let truncation = library.get_truncation().map(|truncation| truncation.direction);
            library.with_truncation(None)?.with_padding(None);
            library.set_encode_special_tokens(rules.splits_special);
            let added: Vec<tokenizers::AddedToken> = added(rules, text)?.iter().map(of_library).collect();
            library.add_tokens(&added);
            let truncates_left = matches!(truncation, Some(TruncationDirection::Left));
            Ok(Vocabulary { library: Box::new(library), truncates_left })
        })
    }

    /// Number of ids.
    pub(super) fn size(&self) -> usize {
        self.library.get_vocab_size(true)
    }

    /// Returns the ids of a text, without those that the tokenizer would add around it.
    ///
    /// # Errors
    /// If the library fails.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, Source> {
        let encoding = hostile::guarded(|| self.library.encode_fast(text, false))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Returns the ids of a text as [`encode`](Vocabulary::encode) does, with the byte range of each.
    ///
    /// # Errors
    /// If the library fails.
    pub(super) fn encode_with_offsets(&self, text: &str) -> Result<Encoded, Source> {
        let encoding = hostile::guarded(|| self.library.encode(text, false))?;
        let offsets = encoding.get_offsets().iter().map(|&(start, end)| start..end).collect();
        Ok(Encoded { ids: encoding.get_ids().to_vec(), offsets })
    }

    /// Returns the tokens that the tokenizer adds around a text.
    ///
    /// # Errors
    /// If the library fails.
    pub(super) fn ends(&self) -> Result<Ends, Source> {
        let encoding = hostile::guarded(|| self.library.encode(ANY_TEXT, true))?;
        let is_of_text: Vec<bool> = encoding.get_sequence_ids().iter().map(Option::is_some).collect();
        let ids = encoding.get_ids();
        let before = is_of_text.iter().position(|&is| is).unwrap_or(ids.len());
        let after = is_of_text.iter().rposition(|&is| is).map_or(ids.len(), |last| last + 1);
        Ok(Ends { before: ids[..before].to_vec(), after: ids[after..].to_vec() })
    }

    /// Returns the text of tokens, including special ones.
    ///
    /// # Errors
    /// If the library fails.
    pub(super) fn decode(&self, ids: &[u32]) -> Result<String, Source> {
        hostile::guarded(|| self.library.decode(ids, false))
    }

    /// Whether the file asks to truncate texts at their start.
    pub(super) fn truncates_left(&self) -> bool {
        self.truncates_left
    }

    /// Whether a token is special.
    pub(super) fn is_special(&self, id: u32) -> bool {
        let added = self.library.get_added_vocabulary();
        added.get_added_tokens_decoder().get(&id).is_some_and(|token| token.special)
    }

    /// Returns the id of a token; `None` if the text is not a single token.
    pub(super) fn id(&self, token: &str) -> Option<u32> {
        self.library.token_to_id(token)
    }
}

/// The part of a `tokenizer.json` that lists added tokens.
#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    added_tokens: Vec<Value>,
}

/// Returns the tokens to add to those of the vocabulary, in the order in which transformers adds them, which determines the
/// ids of new ones.
fn added(rules: &Rules, text: &str) -> Result<Vec<AddedToken>, Source> {
    let Parts { added_tokens } = serde_json::from_str(text)?;
    let of_file: BTreeMap<u64, AddedToken> = added_tokens
        .iter()
        .filter_map(|token| Some((token["id"].as_u64()?, AddedToken::of(token)?)))
        .collect();
    let mut known: HashSet<String> = HashSet::new();
    if rules.class.is_none() {
        known.extend(of_file.values().map(|token| token.content.clone()));
    }
    let mut by_id = rules.added.clone();
    if !rules.is_complete {
        by_id.extend(of_file);
    }
    let mut added: Vec<AddedToken> = by_id.into_values().collect();
    for token in &mut added {
        token.special |= rules.named.iter().any(|named| named.content == token.content);
        known.insert(token.content.clone());
    }
    added.extend(
        rules.named.iter().chain(&rules.extra).filter(|token| known.insert(token.content.clone())).cloned(),
    );
    if matches!(rules.class, Some(Class::Qwen2 { .. })) {
        // It adds its special tokens again, with the default rules.
        added.extend(rules.named.iter().chain(&rules.extra).map(|token| AddedToken::special(&token.content)));
    }
    Ok(added)
}

fn of_library(token: &AddedToken) -> tokenizers::AddedToken {
    let [strips_left, strips_right] = token.strips;
    tokenizers::AddedToken::from(token.content.clone(), token.special)
        .lstrip(strips_left)
        .rstrip(strips_right)
        .single_word(token.single_word)
        .normalized(token.normalized)
}
