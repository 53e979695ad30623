//! Which tokens of a conversation a model is to say.

use std::ops::Range;

use super::{Chat, Rendered};
use crate::data::tokenizer::{Encoded, Tokenizer};

/// Tokens and what they are made of.
pub(super) struct Tokenized<'a> {
    pub(super) text: &'a str,
    pub(super) tokens: Encoded,
    pub(super) tokenizer: &'a Tokenizer,
}

impl Tokenized<'_> {
    /// The tokens that have a part in a range of bytes.
    fn within(&self, bytes: &Range<usize>) -> Range<usize> {
        let offsets = &self.tokens.offsets;
        let first = offsets.partition_point(|token| token.end <= bytes.start);
        let end = offsets.partition_point(|token| token.start < bytes.end);
        first..end.max(first)
    }

    /// The last token of a range that is more than white space.
    fn last_said(&self, tokens: Range<usize>) -> Option<usize> {
        let is_said = |&token: &usize| !self.text[self.tokens.offsets[token].clone()].trim().is_empty();
        tokens.rev().find(is_said)
    }

    /// The special token that ends a range, but for white space behind it.
    fn closing(&self, tokens: Range<usize>) -> Option<usize> {
        self.last_said(tokens).filter(|&token| self.tokenizer.is_special(self.tokens.ids[token]))
    }
}

/// Whether each token is part of an answer.
///
/// A template with blocks of `{% generation %}` says so itself. Of others, message i is rendered as the last one, and the
/// messages before it with the prompt of an answer: if both begin the whole text, the answer is what lies between. White
/// space behind the token that ends a turn is the template's, and does not count.
///
/// # Errors
/// In words, that it can not be known.
pub(super) fn find(
    chat: &Chat<'_>,
    whole: &Rendered,
    tokenized: &Tokenized<'_>,
) -> Result<Vec<bool>, String> {
    let mut is_answer = vec![false; tokenized.tokens.ids.len()];
    if chat.template.has_generation() {
        let prompt = chat.conversation.prompt;
        let start = if prompt == 0 { 0 } else { start_of(chat, whole, prompt)? };
        for bytes in whole.generated.iter().filter(|bytes| bytes.start >= start) {
            is_answer[tokenized.within(bytes)].fill(true);
        }
        return Ok(is_answer);
    }
    for index in chat.conversation.answers() {
        is_answer[of_message(chat, whole, tokenized, index)?].fill(true);
    }
    Ok(is_answer)
}

/// Where the text of an answer begins: behind the prompt for it.
fn start_of(chat: &Chat<'_>, whole: &Rendered, index: usize) -> Result<usize, String> {
    if index == 0 {
        return Err(unknown(index, "it is the first"));
    }
    let prompt = chat.render(index, true);
    let prompt = prompt.map_err(|fault| unknown(index, &format!("of the messages before it, {fault}")))?;
    match whole.text.starts_with(&prompt.text) {
        true => Ok(prompt.text.len()),
        false => Err(unknown(index, "without it, the chat template writes the messages before it otherwise")),
    }
}

fn of_message(
    chat: &Chat<'_>,
    whole: &Rendered,
    tokenized: &Tokenized<'_>,
    index: usize,
) -> Result<Range<usize>, String> {
    let start = start_of(chat, whole, index)?;
    let upto = chat.render(index + 1, false);
    let upto = upto.map_err(|fault| unknown(index, &format!("of the messages up to it, {fault}")))?.text;
    if whole.text.starts_with(&upto) && upto.len() >= start {
        let tokens = tokenized.within(&(start..upto.len()));
        let end = tokenized.closing(tokens.clone()).map_or(tokens.end, |closing| closing + 1);
        return Ok(tokens.start..end);
    }
    // Some templates leave out of earlier answers what the last one has, such as reasoning. A turn still ends with the same
    // token.
    let last = chat.tokenize(&upto)?;
    let closing = last.closing(0..last.tokens.ids.len()).map(|token| last.tokens.ids[token]);
    let mut tokens = tokenized.within(&(start..whole.text.len()));
    let first = tokens.start;
    let end = tokens.find(|&token| Some(tokenized.tokens.ids[token]) == closing);
    let end = end.ok_or_else(|| {
        unknown(index, "as the last one the chat template writes it otherwise, and no special token ends it")
    })?;
    Ok(first..end + 1)
}

fn unknown(index: usize, why: &str) -> String {
    let message = index + 1;
    format!(
        "which tokens of message {message} are the answer can not be known: {why}. Let the template say it, by \
         {{% generation %}} (data.chat_template names another template), or count all tokens: data.loss_on = \"all\""
    )
}
