//! Tokens that are put around documents, by what documents are.

use super::error::DataError;
use super::tokenizer::Tokenizer;
use super::warning::DataWarning;
use crate::config::{DataConfig, EndToken, Packing};

/// What a document was before it became tokens: that decides what is put around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// A text.
    Text,
    /// Token ids: who made them has put there what belongs there.
    Ids,
    /// A prompt with its completion.
    Completion,
    /// Messages: their template has written all that begins and ends them.
    Conversation,
}

impl Form {
    /// All of them, in the order of their numbers.
    pub(super) const ALL: [Form; 4] = [Form::Text, Form::Ids, Form::Completion, Form::Conversation];
}

/// Ids that stand around a document.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Around {
    /// In front of it.
    pub(super) bos: Option<u32>,
    /// Behind it.
    pub(super) eos: Option<u32>,
}

impl Around {
    /// How many these are.
    pub(super) fn count(self) -> usize {
        usize::from(self.bos.is_some()) + usize::from(self.eos.is_some())
    }
}

/// Ids that are added to documents.
#[derive(Clone, Copy, Debug)]
pub(super) struct Special {
    text: Around,
    ids: Around,
    completion: Around,
    /// What short samples are filled with.
    pub(super) pad: u32,
    /// Whether what is too long loses its beginning, rather than its end.
    pub(super) clips_left: bool,
}

impl Special {
    /// Those of a configuration.
    ///
    /// # Errors
    /// [`DataError::SpecialToken`]: a token that does not exist; [`DataError::Tokenizer`].
    pub(super) fn resolve(config: &DataConfig, tokenizer: &Tokenizer) -> Result<Special, DataError> {
        let ends = tokenizer.ends()?;
        let text = Around {
            bos: resolved(&config.bos, &ends.before, "data.bos", tokenizer)?,
            eos: resolved(&config.eos, &ends.after, "data.eos", tokenizer)?,
        };
        let ids = Around {
            bos: text.bos.filter(|_| is_given(&config.bos)),
            eos: text.eos.filter(|_| is_given(&config.eos)),
        };
        // A model that never sees where an answer ends does not end one.
        let end = || tokenizer.eos().filter(|_| config.eos == Some(EndToken::Auto));
        let pad = match config.packing {
            // A stream has no short samples.
            Packing::Stream => 0,
            Packing::Documents | Packing::Packed => tokenizer.resolve(&config.pad, "data.pad")?,
        };
        let completion = Around { eos: text.eos.or_else(end), ..text };
        Ok(Special { text, ids, completion, pad, clips_left: tokenizer.truncates_left() })
    }

    /// What stands around documents.
    pub(super) fn around(&self, form: Form) -> Around {
        match form {
            Form::Text => self.text,
            Form::Ids => self.ids,
            Form::Completion => self.completion,
            Form::Conversation => Around::default(),
        }
    }

    /// Says where documents, so many of each form, lack what begins or ends them. Bytes have no token for that.
    pub(super) fn warnings(
        &self,
        config: &DataConfig,
        has_vocabulary: bool,
        count: impl Fn(Form) -> usize,
    ) -> Vec<DataWarning> {
        let [texts, completions, conversations] =
            [Form::Text, Form::Completion, Form::Conversation].map(&count);
        let mut warnings = Vec::new();
        let joins = config.packing == Packing::Stream && Form::ALL.into_iter().map(&count).sum::<usize>() > 1;
        if joins && has_vocabulary && texts > 0 && self.text.count() == 0 {
            warnings.push(DataWarning::Joined { documents: texts });
        }
        let lacks_end = config.eos == Some(EndToken::Auto) && self.completion.eos.is_none();
        if lacks_end && has_vocabulary && completions > 0 {
            warnings.push(DataWarning::Endless { documents: completions });
        }
        if conversations > 0 && (is_given(&config.bos) || is_given(&config.eos)) {
            warnings.push(DataWarning::Unframed { conversations });
        }
        warnings
    }

    /// That every id that is added to documents of these forms is below the vocabulary size of the model.
    ///
    /// # Errors
    /// For the first that is not.
    pub(super) fn check_vocabulary(
        &self,
        forms: impl IntoIterator<Item = Form>,
        vocab_size: usize,
    ) -> Result<(), DataError> {
        let around = forms.into_iter().map(|form| self.around(form));
        let ids = around.flat_map(|Around { bos, eos }| [("data.bos", bos), ("data.eos", eos)]);
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

/// The id that a setting means, where the tokenizer itself puts these.
fn resolved(
    token: &Option<EndToken>,
    own: &[u32],
    key: &'static str,
    tokenizer: &Tokenizer,
) -> Result<Option<u32>, DataError> {
    match (token, own) {
        (None, _) | (Some(EndToken::Auto), []) => Ok(None),
        (Some(EndToken::Auto), &[id]) => Ok(Some(id)),
        (Some(EndToken::Auto), several) => {
            let count = several.len();
            let reason =
                format!("is \"auto\", and the tokenizer puts {count} tokens there; give one, or \"none\"");
            Err(DataError::SpecialToken { key, reason })
        }
        (Some(EndToken::Token(token)), _) => tokenizer.resolve(token, key).map(Some),
    }
}

/// Whether a run file names a token itself.
fn is_given(token: &Option<EndToken>) -> bool {
    matches!(token, Some(EndToken::Token(_)))
}
