//! Replaces `tokenizer.json` support in a build without the tokenizer library.

use super::fault::{Source, TokenizerFault};
use super::special::TokenizerConfig;
use super::{Encoded, Ends};

/// A vocabulary, of which there are none in this build.
#[derive(Clone, Debug)]
pub(super) enum Vocabulary {}

impl Vocabulary {
    /// # Errors
    /// [`TokenizerFault::Feature`].
    pub(super) fn parse(_text: &str, _config: &TokenizerConfig) -> Result<Vocabulary, Source> {
        Err(TokenizerFault::Feature.into())
    }

    pub(super) fn size(&self) -> usize {
        match *self {}
    }

    pub(super) fn encode(&self, _text: &str) -> Result<Vec<u32>, Source> {
        match *self {}
    }

    pub(super) fn encode_with_offsets(&self, _text: &str) -> Result<Encoded, Source> {
        match *self {}
    }

    pub(super) fn ends(&self) -> Result<Ends, Source> {
        match *self {}
    }

    pub(super) fn decode(&self, _ids: &[u32]) -> Result<String, Source> {
        match *self {}
    }

    pub(super) fn is_special(&self, _id: u32) -> bool {
        match *self {}
    }

    pub(super) fn truncates_left(&self) -> bool {
        match *self {}
    }

    pub(super) fn id(&self, _token: &str) -> Option<u32> {
        match *self {}
    }
}
