//! Finds the tokens of a conversation that the model should learn to say.

use std::ops::Range;

use super::{Chat, Rendered};
use crate::data::tokenizer::{Encoded, Tokenizer};

/// Tokens, and the text that they were made from.
pub(super) struct Tokenized<'a> {
    pub(super) text: &'a str,
    pub(super) tokens: Encoded,
    pub(super) tokenizer: &'a Tokenizer,
}

impl Tokenized<'_> {
    /// Returns the tokens that overlap a byte range.
    fn within(&self, bytes: &Range<usize>) -> Range<usize> {
        let offsets = &self.tokens.offsets;
        let first = offsets.partition_point(|token| token.end <= bytes.start);
        let end = offsets.partition_point(|token| token.start < bytes.end);
        first..end.max(first)
    }

    /// Returns the last token of a range that is more than white space.
    fn last_visible(&self, tokens: Range<usize>) -> Option<usize> {
        let is_visible = |&token: &usize| !self.text[self.tokens.offsets[token].clone()].trim().is_empty();
        tokens.rev().find(is_visible)
    }

    /// Returns the special token that ends a range, ignoring white space after it.
    fn closing(&self, tokens: Range<usize>) -> Option<usize> {
        self.last_visible(tokens).filter(|&token| self.tokenizer.is_special(self.tokens.ids[token]))
    }
}

/// Returns whether each token is part of an answer.
///
/// A template with `{% generation %}` blocks marks the answers itself. For other templates, the text is rendered up to
/// and including message i, and up to the prompt for message i. If both are prefixes of the whole text, the answer is
/// the difference. White space after the token that ends a turn belongs to the template and does not count.
///
/// # Errors
/// A description of why the answers cannot be determined.
pub(super) fn find(
    chat: &Chat<'_>,
    rendered: &Rendered,
    tokenized: &Tokenized<'_>,
) -> Result<Vec<bool>, String> {
    let mut is_answer = vec![false; tokenized.tokens.ids.len()];
    if chat.template.has_generation() {
        let prompt = chat.conversation.prompt;
        let start = if prompt == 0 { 0 } else { answer_start(chat, rendered, prompt)? };
        for bytes in rendered.generated.iter().filter(|bytes| bytes.start >= start) {
            is_answer[tokenized.within(bytes)].fill(true);
        }
        return Ok(is_answer);
    }
    for index in chat.conversation.answers() {
        is_answer[answer_tokens(chat, rendered, tokenized, index)?].fill(true);
    }
    Ok(is_answer)
}

/// Returns where the text of an answer starts: after the prompt for it.
fn answer_start(chat: &Chat<'_>, rendered: &Rendered, index: usize) -> Result<usize, String> {
    if index == 0 {
        return Err(undetermined(index, "no message precedes it"));
    }
    let prompt = chat.render(index, true);
    let prompt =
        prompt.map_err(|fault| undetermined(index, &format!("with only the messages before it, {fault}")))?;
    match rendered.text.starts_with(&prompt.text) {
        true => Ok(prompt.text.len()),
        false => Err(undetermined(
            index,
            "without it, the chat template renders the messages before it differently",
        )),
    }
}

fn answer_tokens(
    chat: &Chat<'_>,
    rendered: &Rendered,
    tokenized: &Tokenized<'_>,
    index: usize,
) -> Result<Range<usize>, String> {
    let start = answer_start(chat, rendered, index)?;
    let partial = chat.render(index + 1, false);
    let partial = partial
        .map_err(|fault| undetermined(index, &format!("with only the messages up to it, {fault}")))?
        .text;
    if rendered.text.starts_with(&partial) && partial.len() >= start {
        let tokens = tokenized.within(&(start..partial.len()));
        let end = tokenized.closing(tokens.clone()).map_or(tokens.end, |closing| closing + 1);
        return Ok(tokens.start..end);
    }
    // Some templates omit parts of earlier answers that they write for the last one, such as reasoning. The turn still
    // ends with the same token.
    let last = chat.tokenize(&partial)?;
    let closing = last.closing(0..last.tokens.ids.len()).map(|token| last.tokens.ids[token]);
    let mut tokens = tokenized.within(&(start..rendered.text.len()));
    let first = tokens.start;
    let end = tokens.find(|&token| Some(tokenized.tokens.ids[token]) == closing);
    let end = end.ok_or_else(|| {
        undetermined(
            index,
            "the chat template renders it differently as the last one, and no special token ends it",
        )
    })?;
    Ok(first..end + 1)
}

fn undetermined(index: usize, cause: &str) -> String {
    let message = index + 1;
    format!(
        "cannot tell which tokens of message {message} are the answer: {cause}. Mark them in the template by \
         {{% generation %}} (data.chat_template can name another template), or count all tokens: \
         data.loss_on = \"all\""
    )
}
