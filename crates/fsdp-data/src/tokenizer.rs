//! From text to token ids.

mod added;
mod class;
mod fault;
#[cfg(feature = "tokenizers")]
mod hostile;
#[cfg(feature = "tokenizers")]
mod rebuilt;
mod special;

#[cfg(not(feature = "tokenizers"))]
#[path = "tokenizer/absent.rs"]
mod vocabulary;
#[cfg(feature = "tokenizers")]
mod vocabulary;

use std::ops::Range;
use std::path::Path;

use fsdp_ckpt::digest::{Digest, DigestKind};
use fsdp_config::TokenRef;
use fsdp_config::input_file::{self, TOKENIZER_BYTES_MAX};
use serde_json::{Map, Value};

pub use fault::TokenizerFault;

use fault::Source;
use special::{EOS, TokenizerConfig};
use vocabulary::Vocabulary;

use super::error::DataError;

const BYTES: &str = "bytes";

/// A tokenizer.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    name: String,
    vocabulary: Option<Vocabulary>,
    config: TokenizerConfig,
    /// Length in bytes and checksum of the file; `None` for the byte tokenizer.
    digest: Option<(usize, Digest)>,
}

/// Tokens of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Encoded {
    /// Token ids.
    pub(super) ids: Vec<u32>,
    /// The byte range of each token, in order.
    pub(super) offsets: Vec<Range<usize>>,
}

/// Tokens that a tokenizer adds around a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ends {
    /// Ids before the text, such as a token for the start of a document.
    pub(super) before: Vec<u32>,
    /// Ids after the text, such as a token for its end.
    pub(super) after: Vec<u32>,
}

impl Tokenizer {
    /// Loads `"bytes"` (256 tokens, the id is the byte), or the path of a Hugging Face `tokenizer.json`.
    ///
    /// A `tokenizer_config.json` next to it is applied as transformers does, if it exists. Truncation and padding that the file may
    /// request are disabled, because packing takes care of them.
    ///
    /// # Errors
    /// If a file cannot be read, or would need far more memory than its size; any file, in a build without the feature
    /// `tokenizers`.
    pub fn load(name: &str) -> Result<Tokenizer, DataError> {
        if name == BYTES {
            let config = TokenizerConfig::default();
            return Ok(Tokenizer { name: name.to_owned(), vocabulary: None, config, digest: None });
        }
        let load = || -> Result<_, Source> {
            let text = input_file::read_text(Path::new(name), TOKENIZER_BYTES_MAX)?;
            let digest = (text.len(), DigestKind::Crc64.of(text.as_bytes()));
            let config = TokenizerConfig::read_next_to(Path::new(name))?;
            Ok((Vocabulary::parse(&text, &config)?, config, digest))
        };
        let failed = |source| DataError::Tokenizer { file: name.into(), source };
        let (vocabulary, config, digest) = load().map_err(failed)?;
        Ok(Tokenizer { name: name.to_owned(), vocabulary: Some(vocabulary), config, digest: Some(digest) })
    }

    /// Digest of the file and of what the files next to it say about its tokens; `None` for the byte tokenizer.
    pub(super) fn digest(&self) -> Option<fsdp_core::Digest> {
        self.digest.map(|file| fsdp_core::Digest::of(&(file, &self.config.rules)))
    }

    /// Folder of the file; `None` for the byte tokenizer.
    pub(super) fn folder(&self) -> Option<&Path> {
        self.vocabulary.is_some().then(|| Path::new(&self.name).parent().unwrap_or(Path::new("")))
    }

    /// Special tokens by their role, such as `bos_token`.
    pub(super) fn special_tokens(&self) -> &Map<String, Value> {
        &self.config.roles
    }

    /// The value of `chat_template` in `tokenizer_config.json`.
    pub(super) fn chat_template(&self) -> &Value {
        &self.config.chat_template
    }

    /// Whether texts that are too long are truncated at their start rather than at their end.
    pub(super) fn truncates_left(&self) -> bool {
        let by_config = self.config.truncation_side.as_deref().map(|side| side == "left");
        by_config.unwrap_or_else(|| self.vocabulary.as_ref().is_some_and(Vocabulary::truncates_left))
    }

    /// Returns the tokens that the tokenizer adds around a text.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub(super) fn ends(&self) -> Result<Ends, DataError> {
        let failed = |source| DataError::Tokenizer { file: (&self.name).into(), source };
        self.vocabulary.as_ref().map_or(Ok(Ends::default()), |vocabulary| vocabulary.ends().map_err(failed))
    }

    /// Number of ids.
    pub(super) fn vocab_size(&self) -> usize {
        self.vocabulary.as_ref().map_or(256, Vocabulary::size)
    }

    /// Returns the ids of a text, without those that the tokenizer would add around it.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Box<dyn std::error::Error + Send + Sync>> {
        let Some(vocabulary) = &self.vocabulary else { return Ok(text.bytes().map(u32::from).collect()) };
        vocabulary.encode(text)
    }

    /// Returns the ids of a text, as [`encode`](Tokenizer::encode) does, with the byte range of each.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub(super) fn encode_with_offsets(&self, text: &str) -> Result<Encoded, Source> {
        match &self.vocabulary {
            Some(vocabulary) => vocabulary.encode_with_offsets(text),
            None => {
                let ids = text.bytes().map(u32::from).collect();
                Ok(Encoded { ids, offsets: (0..text.len()).map(|at| at..at + 1).collect() })
            }
        }
    }

    /// Returns the text of tokens, including special ones.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub(super) fn decode(&self, ids: &[u32]) -> Result<String, Source> {
        let bytes = || ids.iter().map(|&id| u8::try_from(id).unwrap_or(b'?')).collect::<Vec<u8>>();
        let text = || String::from_utf8_lossy(&bytes()).into_owned();
        self.vocabulary.as_ref().map_or_else(|| Ok(text()), |vocabulary| vocabulary.decode(ids))
    }

    /// Returns the ids of a text for the model to continue, including the ids that the tokenizer adds before a text.
    ///
    /// # Errors
    /// [`DataError::Tokenizer`].
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let mut ids = self.ends()?.before;
        let failed = |source| DataError::Tokenizer { file: (&self.name).into(), source };
        ids.extend(self.encode(text).map_err(failed)?);
        Ok(ids)
    }

    /// Returns the text of tokens, including special ones.
    ///
    /// # Errors
    /// [`DataError::Tokenizer`].
    pub fn text(&self, ids: &[u32]) -> Result<String, DataError> {
        self.decode(ids).map_err(|source| DataError::Tokenizer { file: (&self.name).into(), source })
    }

    /// The token that ends a text, as named by the tokenizer, or else by the model files next to it.
    pub fn eos(&self) -> Option<u32> {
        let vocabulary = self.vocabulary.as_ref()?;
        let named = self.config.roles.get(EOS).and_then(Value::as_str);
        named.map_or(self.config.eos_id, |token| vocabulary.id(token))
    }

    /// The tokens at which generation stops, as named by the tokenizer and by the model files next to it.
    pub(super) fn stops(&self) -> Vec<u32> {
        self.eos().into_iter().chain(self.config.stop_ids.iter().copied()).collect()
    }

    /// Returns the token that separates consecutive texts, if there is one and the tokenizer itself adds no tokens
    /// around a text.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn separator(&self) -> Result<Option<TokenRef>, DataError> {
        let Some(id) = self.eos().filter(|_| self.ends().is_ok_and(|ends| ends == Ends::default())) else {
            return Ok(None);
        };
        let text = TokenRef::Token(self.text(&[id])?);
        let is_same = self.resolve(&text, "data.eos").is_ok_and(|found| found == id);
        Ok(Some(if is_same { text } else { TokenRef::Id(id) }))
    }

    /// Whether a token is special: not text, but a separator of texts.
    pub(super) fn is_special(&self, id: u32) -> bool {
        self.vocabulary.as_ref().is_some_and(|vocabulary| vocabulary.is_special(id))
    }

    /// Returns the id of a token; `key` names the setting in errors.
    ///
    /// # Errors
    /// If the token is given by its text and is not a single token.
    pub(super) fn resolve(&self, token: &TokenRef, key: &'static str) -> Result<u32, DataError> {
        let text = match token {
            TokenRef::Id(id) => return Ok(*id),
            TokenRef::Token(text) => text,
        };
        let id = match (&self.vocabulary, text.as_bytes()) {
            (Some(vocabulary), _) => vocabulary.id(text),
            (None, [byte]) => Some(u32::from(*byte)),
            (None, _) => None,
        };
        id.ok_or_else(|| {
            let tokenizer = &self.name;
            let reason = format!(
                "is \"{text}\", which tokenizer \"{tokenizer}\" does not have; use one of its tokens, or an \
                 id"
            );
            DataError::SpecialToken { key, reason }
        })
    }
}

#[cfg(feature = "tokenizers")]
#[cfg(test)]
mod tests;
