//! A `tokenizer.json`, read by Hugging Face's library.

use tokenizers::{AddedToken, TruncationDirection};

use super::fault::Source;
use super::hostile;
use super::special::SpecialToken;
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
    /// Parses a `tokenizer.json`. Truncation and padding that the file may request are disabled, because packing takes
    /// care of them. Tokens of `special` that the file does not list as special are added.
    ///
    /// # Errors
    /// If the text is not a tokenizer, or would need far more memory than its size.
    pub(super) fn parse(text: &str, special: &[SpecialToken]) -> Result<Vocabulary, Source> {
        hostile::guarded(|| {
            hostile::check(text)?;
            let mut library: tokenizers::Tokenizer = text.parse()?;
            let truncation = library.get_truncation().map(|truncation| truncation.direction);
            library.with_truncation(None)?.with_padding(None);
            let known = library.get_added_tokens_decoder();
            let is_known = |token: &SpecialToken| known.values().any(|known| known.content == token.content);
            let new: Vec<AddedToken> = special.iter().filter(|token| !is_known(token)).map(added).collect();
            library.add_special_tokens(&new);
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

fn added(token: &SpecialToken) -> AddedToken {
    let [strips_left, strips_right] = token.strips;
    AddedToken::from(token.content.clone(), true)
        .lstrip(strips_left)
        .rstrip(strips_right)
        .single_word(token.single_word)
        .normalized(false)
}
