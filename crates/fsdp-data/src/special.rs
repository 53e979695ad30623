//! Special tokens that are added around documents, depending on their form.

use fsdp_config::{DataConfig, EndToken, Packing};

use super::error::DataError;
use super::tokenizer::Tokenizer;
use super::warning::DataWarning;

/// The form of a document before tokenizing, which determines the tokens added around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// A text.
    Text,
    /// Token ids, which already include any special tokens.
    Ids,
    /// A prompt with its completion.
    Completion,
    /// Messages, whose template has written all special tokens.
    Conversation,
    /// Messages whose answers end with no token that stops generation.
    OpenConversation,
}

impl Form {
    /// All forms, in the order of their numbers.
    pub(super) const ALL: [Form; 5] =
        [Form::Text, Form::Ids, Form::Completion, Form::Conversation, Form::OpenConversation];
}

/// Ids that are added around a document.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct AddedIds {
    /// The id before the document, if any.
    pub(super) bos: Option<u32>,
    /// The id after the document, if any.
    pub(super) eos: Option<u32>,
}

impl AddedIds {
    /// Number of added ids.
    pub(super) fn count(self) -> usize {
        usize::from(self.bos.is_some()) + usize::from(self.eos.is_some())
    }
}

/// Ids that are added to documents.
#[derive(Clone, Copy, Debug)]
pub(super) struct Special {
    text: AddedIds,
    ids: AddedIds,
    completion: AddedIds,
    /// The id that fills up short samples.
    pub(super) pad: u32,
    /// Whether documents that are too long are truncated at their start rather than at their end.
    pub(super) clips_left: bool,
}

impl Special {
    /// Resolves the special tokens of a configuration.
    ///
    /// # Errors
    /// [`DataError::SpecialToken`] if a token does not exist; [`DataError::Tokenizer`].
    pub(super) fn resolve(config: &DataConfig, tokenizer: &Tokenizer) -> Result<Special, DataError> {
        let ends = tokenizer.ends()?;
        let text = AddedIds {
            bos: resolve_end(&config.bos, &ends.before, "data.bos", tokenizer)?,
            eos: resolve_end(&config.eos, &ends.after, "data.eos", tokenizer)?,
        };
        let ids = AddedIds {
            bos: text.bos.filter(|_| is_given(&config.bos)),
            eos: text.eos.filter(|_| is_given(&config.eos)),
        };
        // A model that never sees the end of an answer does not learn to end one.
        let end = || tokenizer.eos().filter(|_| config.eos == Some(EndToken::Auto));
        let pad = match config.packing {
            // A stream has no short samples.
            Packing::Stream => 0,
            Packing::Documents | Packing::Packed => tokenizer.resolve(&config.pad, "data.pad")?,
        };
        let completion = AddedIds { eos: text.eos.or_else(end), ..text };
        Ok(Special { text, ids, completion, pad, clips_left: tokenizer.truncates_left() })
    }

    /// Returns the ids added around documents of a form.
    pub(super) fn added_ids(&self, form: Form) -> AddedIds {
        match form {
            Form::Text => self.text,
            Form::Ids => self.ids,
            Form::Completion => self.completion,
            Form::Conversation | Form::OpenConversation => AddedIds::default(),
        }
    }

    /// Returns warnings about missing or ignored bos and eos tokens, given the number of documents of each form. The
    /// byte tokenizer has no such tokens, so it is exempt.
    pub(super) fn warnings(
        &self,
        config: &DataConfig,
        has_vocabulary: bool,
        count: impl Fn(Form) -> usize,
    ) -> Vec<DataWarning> {
        let [texts, completions, closed, open] =
            [Form::Text, Form::Completion, Form::Conversation, Form::OpenConversation].map(&count);
        let conversations = closed + open;
        let mut warnings = Vec::new();
        let is_joined =
            config.packing == Packing::Stream && Form::ALL.into_iter().map(&count).sum::<usize>() > 1;
        if is_joined && has_vocabulary && texts > 0 && self.text.count() == 0 {
            warnings.push(DataWarning::Joined { documents: texts });
        }
        let lacks_end = config.eos == Some(EndToken::Auto) && self.completion.eos.is_none();
        if lacks_end && has_vocabulary && completions > 0 {
            warnings.push(DataWarning::Endless { documents: completions });
        }
        if open > 0 {
            warnings.push(DataWarning::Open { open, conversations });
        }
        if conversations > 0 && (is_given(&config.bos) || is_given(&config.eos)) {
            warnings.push(DataWarning::Unframed { conversations });
        }
        warnings
    }

    /// Checks that every id added to documents of these forms is below the vocabulary size of the model.
    ///
    /// # Errors
    /// For the first id that is not.
    pub(super) fn check_vocabulary(
        &self,
        forms: impl IntoIterator<Item = Form>,
        vocab_size: usize,
    ) -> Result<(), DataError> {
        let added_ids = forms.into_iter().map(|form| self.added_ids(form));
        let ids = added_ids.flat_map(|AddedIds { bos, eos }| [("data.bos", bos), ("data.eos", eos)]);
        for (key, id) in ids.chain([("data.pad", Some(self.pad))]) {
            if let Some(id) = id.filter(|&id| id as usize >= vocab_size) {
                let reason = format!(
                    "has id {id}, but the model's vocab_size is {vocab_size}; choose another token or model"
                );
                return Err(DataError::SpecialToken { key, reason });
            }
        }
        Ok(())
    }
}

/// Resolves a setting to an id; `tokenizer_ids` are the ids that the tokenizer itself adds there.
fn resolve_end(
    token: &Option<EndToken>,
    tokenizer_ids: &[u32],
    key: &'static str,
    tokenizer: &Tokenizer,
) -> Result<Option<u32>, DataError> {
    match (token, tokenizer_ids) {
        (None, _) | (Some(EndToken::Auto), []) => Ok(None),
        (Some(EndToken::Auto), &[id]) => Ok(Some(id)),
        (Some(EndToken::Auto), ids) => {
            let count = ids.len();
            let reason =
                format!("is \"auto\", but the tokenizer puts {count} tokens there; set one, or \"none\"");
            Err(DataError::SpecialToken { key, reason })
        }
        (Some(EndToken::Token(token)), _) => tokenizer.resolve(token, key).map(Some),
    }
}

/// Whether the run file names a token.
fn is_given(token: &Option<EndToken>) -> bool {
    matches!(token, Some(EndToken::Token(_)))
}
