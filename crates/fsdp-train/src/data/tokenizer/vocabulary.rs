//! A `tokenizer.json`, read by the library of Hugging Face.

use super::fault::Source;
use super::hostile;

/// The tokens of a `tokenizer.json`, and how text becomes them.
#[derive(Clone, Debug)]
pub(super) struct Vocabulary(Box<tokenizers::Tokenizer>);

impl Vocabulary {
    /// Truncation and padding that the file may ask for are turned off: cutting is the packing's task.
    ///
    /// # Errors
    /// If the text is no tokenizer, or would take more memory than it has bytes by far.
    pub(super) fn parse(text: &str) -> Result<Vocabulary, Source> {
        hostile::guarded(|| {
            hostile::check(text)?;
            let mut tokenizer: tokenizers::Tokenizer = text.parse()?;
            tokenizer.with_truncation(None)?.with_padding(None);
            Ok(Vocabulary(Box::new(tokenizer)))
        })
    }

    /// The number of ids.
    pub(super) fn size(&self) -> usize {
        self.0.get_vocab_size(true)
    }

    /// The ids of a text, without any that the tokenizer would put around it.
    ///
    /// # Errors
    /// If the library fails.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, Source> {
        let encoding = hostile::guarded(|| self.0.encode_fast(text, false))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The id of a token, if it is one.
    pub(super) fn id(&self, token: &str) -> Option<u32> {
        self.0.token_to_id(token)
    }
}
