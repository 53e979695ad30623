//! From text to token ids.

mod fault;
#[cfg(feature = "tokenizers")]
mod hostile;

#[cfg(not(feature = "tokenizers"))]
#[path = "tokenizer/absent.rs"]
mod vocabulary;
#[cfg(feature = "tokenizers")]
mod vocabulary;

use std::path::Path;

use fsdp_ckpt::digest::{Digest, DigestKind};

pub use fault::TokenizerFault;

use vocabulary::Vocabulary;

use super::error::DataError;
use crate::config::TokenRef;
use crate::input_file::{self, TOKENIZER_BYTES_MAX};

const BYTES: &str = "bytes";

/// A tokenizer.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    name: String,
    vocabulary: Option<Vocabulary>,
    /// Of the file.
    digest: Option<(usize, Digest)>,
}

impl Tokenizer {
    /// `"bytes"` (256 tokens, the id is the byte), or the path of a Hugging Face `tokenizer.json`.
    ///
    /// Truncation and padding that the file may ask for are turned off: cutting is the packing's task.
    ///
    /// # Errors
    /// If the file cannot be read, or would take more memory than it has bytes by far; any file, in a build without the
    /// feature `tokenizers`.
    pub fn load(name: &str) -> Result<Tokenizer, DataError> {
        if name == BYTES {
            return Ok(Tokenizer { name: name.to_owned(), vocabulary: None, digest: None });
        }
        let load = || -> Result<_, fault::Source> {
            let text = input_file::read_text(Path::new(name), TOKENIZER_BYTES_MAX)?;
            let digest = (text.len(), DigestKind::Crc64.of(text.as_bytes()));
            Ok((Vocabulary::parse(&text)?, digest))
        };
        let failed = |source| DataError::Tokenizer { file: name.into(), source };
        let (vocabulary, digest) = load().map_err(failed)?;
        Ok(Tokenizer { name: name.to_owned(), vocabulary: Some(vocabulary), digest: Some(digest) })
    }

    /// Length and checksum of the file; `"bytes"` is none.
    pub(super) fn digest(&self) -> Option<(usize, Digest)> {
        self.digest
    }

    /// The number of ids.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.as_ref().map_or(256, Vocabulary::size)
    }

    /// The ids of a text, without any that the tokenizer would put around it.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Box<dyn std::error::Error + Send + Sync>> {
        let Some(vocabulary) = &self.vocabulary else { return Ok(text.bytes().map(u32::from).collect()) };
        vocabulary.encode(text)
    }

    /// The id of a token; `key` names the setting in errors.
    ///
    /// # Errors
    /// If it is given by its text and is not one token.
    pub fn resolve(&self, token: &TokenRef, key: &'static str) -> Result<u32, DataError> {
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
                "is \"{text}\", which tokenizer \"{tokenizer}\" does not have; give a token of it, or an id"
            );
            DataError::SpecialToken { key, reason }
        })
    }
}
