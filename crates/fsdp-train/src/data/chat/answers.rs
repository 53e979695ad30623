//! Finds the tokens of a conversation that the model should learn to say.

use std::ops::Range;

use super::probe::Probe;
use super::{Chat, Chats, Rendered};
use crate::config::LossOn;
use crate::data::tokenizer::{Encoded, Tokenizer};

/// Tokens, and the text that they were made from.
pub(super) struct Tokenized<'a> {
    pub(super) text: &'a str,
    pub(super) tokens: Encoded,
    pub(super) tokenizer: &'a Tokenizer,
}

/// Which tokens of a conversation count in the loss.
pub(super) struct Answers {
    /// Whether each token counts.
    pub(super) counts: Vec<bool>,
    /// Whether there are answers, none of which ends with a token that stops generation.
    pub(super) is_open: bool,
}

/// The tokens of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Answer {
    tokens: Range<usize>,
    /// The special token at the end; `None` if the answer ends with text.
    end: Option<u32>,
}

impl Tokenized<'_> {
    /// Returns the tokens that overlap a byte range.
    fn within(&self, bytes: &Range<usize>) -> Range<usize> {
        let offsets = &self.tokens.offsets;
        let first = offsets.partition_point(|token| token.end <= bytes.start);
        let end = offsets.partition_point(|token| token.start < bytes.end);
        first..end.max(first)
    }

    fn is_visible(&self, token: usize) -> bool {
        !self.text[self.tokens.offsets[token].clone()].trim().is_empty()
    }

    /// Returns a special token: the last token of a range, ignoring white space after it, or else the next token after
    /// the range, ignoring white space before it. Some templates write the token that ends an answer outside of their
    /// `{% generation %}` blocks. Others end an answer only by the token that begins the next message, and that is where
    /// generation stops, too.
    fn closing(&self, tokens: &Range<usize>) -> Option<usize> {
        let is_special = |&token: &usize| self.tokenizer.is_special(self.tokens.ids[token]);
        let last = tokens.clone().rev().find(|&token| self.is_visible(token)).filter(is_special);
        let mut after = tokens.end..self.tokens.ids.len();
        last.or_else(|| after.find(|&token| self.is_visible(token)).filter(is_special))
    }

    /// Returns the answer in a byte range. White space after the token that ends an answer belongs to the template.
    fn answer(&self, bytes: &Range<usize>) -> Answer {
        let tokens = self.within(bytes);
        match self.closing(&tokens) {
            Some(end) => Answer { tokens: tokens.start..end + 1, end: Some(self.tokens.ids[end]) },
            None => Answer { tokens, end: None },
        }
    }

    /// Returns the tokens of an answer that are its reasoning: up to the `</think>` in it, and the white space after that.
    /// The `<think>` may stand in the answer, or in the prompt for it.
    fn reasoning(&self, tokens: &Range<usize>) -> Range<usize> {
        let [open, close] = ["<think>", "</think>"];
        let offsets = &self.tokens.offsets[tokens.clone()];
        let text = offsets.first().zip(offsets.last()).map(|(first, last)| first.start..last.end);
        let Some((start, said)) = text.map(|text| (text.start, &self.text[text])) else { return 0..0 };
        let Some((reasoning, answer)) = said.split_once(close) else { return 0..0 };
        let from = start + reasoning.find(open).unwrap_or(0);
        self.within(&(from..start + said.len() - answer.trim_start().len()))
    }

    /// Returns the tokens of a `{% generation %}` block, which the template has chosen, with the token that ends them.
    fn block(&self, bytes: &Range<usize>) -> Answer {
        let Answer { tokens, end } = self.answer(bytes);
        Answer { tokens: tokens.start..tokens.end.max(self.within(bytes).end), end }
    }
}

/// Returns which tokens of a conversation count.
///
/// A template with `{% generation %}` blocks marks the answers itself. For other templates, the text is rendered up to
/// and including message i, and up to the prompt for message i. If both are prefixes of the whole text, the answer is
/// the difference. Otherwise a [`Probe`] finds it.
///
/// # Errors
/// A description of why the answers cannot be determined.
pub(super) fn find(
    chat: &Chat<'_>,
    rendered: &Rendered,
    tokenized: &Tokenized<'_>,
) -> Result<Answers, String> {
    let Chats { loss_on, counts_reasoning, .. } = chat.chats;
    let answers = chat.conversation.answers(*loss_on);
    let of = |(index, _)| answer(chat, rendered, tokenized, index);
    let all = answers.iter().copied();
    let mut counts = vec![*loss_on == LossOn::All; tokenized.tokens.ids.len()];
    let found: Vec<Answer> = if *loss_on == LossOn::All {
        for left_out in all.clone().filter(|(_, counts)| !counts).map(of) {
            counts[left_out?.tokens].fill(false);
        }
        all.filter(|(_, counts)| *counts && !counts_reasoning).map(of).collect::<Result<_, _>>()?
    } else if chat.template.has_generation() {
        blocks(chat, rendered, tokenized, &answers)?
    } else {
        all.filter(|(_, counts)| *counts).map(of).collect::<Result<_, _>>()?
    };
    for answer in &found {
        counts[answer.tokens.clone()].fill(true);
        if !counts_reasoning {
            counts[tokenized.reasoning(&answer.tokens)].fill(false);
        }
    }
    let is_open = *loss_on != LossOn::All && is_open(chat, rendered, &answers, &found);
    Ok(Answers { counts, is_open })
}

/// Whether there are answers that count, none of which ends with a token that stops generation.
fn is_open(chat: &Chat<'_>, rendered: &Rendered, answers: &[(usize, bool)], found: &[Answer]) -> bool {
    let mut ends = found.iter().filter_map(|answer| answer.end);
    if found.is_empty() || ends.clone().any(|id| chat.chats.stops.contains(&id)) {
        return false;
    }
    // Another token may be the beginning of the next message, which is missing after the last answer alone.
    let messages = &chat.conversation.messages;
    let Some(&(last, counts)) = answers.last() else { return true };
    if last + 1 == messages.len() {
        let is_closed = counts && found.last().is_some_and(|answer| answer.end.is_some());
        return !is_closed && !ends.any(|id| ends_with(chat, &rendered.text, id));
    }
    let up_to = chat.render(&messages[..=last], false);
    up_to.is_ok_and(|up_to| !ends.any(|id| ends_with(chat, &up_to.text, id)))
}

/// Whether a text ends with a token, ignoring white space after it.
fn ends_with(chat: &Chat<'_>, text: &str, id: u32) -> bool {
    chat.tokenizer.decode(&[id]).is_ok_and(|token| text.trim_end().ends_with(token.trim_end()))
}

/// Returns the `{% generation %}` blocks behind the prompt that belong to answers that count.
fn blocks(
    chat: &Chat<'_>,
    rendered: &Rendered,
    tokenized: &Tokenized<'_>,
    answers: &[(usize, bool)],
) -> Result<Vec<Answer>, String> {
    let prompt = chat.conversation.prompt;
    let start = if prompt == 0 { 0 } else { answer_start(chat, rendered, prompt)? };
    let blocks = rendered.generated.iter().filter(|bytes| bytes.start >= start);
    let mut blocks: Vec<Answer> = blocks.map(|bytes| tokenized.block(bytes)).collect();
    if blocks.len() == answers.len() {
        let mut counted = answers.iter().map(|(_, counts)| *counts);
        blocks.retain(|_| counted.next() == Some(true));
        return Ok(blocks);
    }
    for &(index, _) in answers.iter().filter(|(_, counts)| !counts) {
        let left_out = answer(chat, rendered, tokenized, index)?.tokens;
        blocks.retain(|Answer { tokens, .. }| tokens.end <= left_out.start || left_out.end <= tokens.start);
    }
    Ok(blocks)
}

/// Returns the tokens of an answer: between the prompt for it and the end of its message.
fn answer(
    chat: &Chat<'_>,
    rendered: &Rendered,
    tokenized: &Tokenized<'_>,
    index: usize,
) -> Result<Answer, String> {
    let probe = Probe { chat, whole: &rendered.text, index };
    let start = answer_start(chat, rendered, index)?;
    let end = match chat.render(&chat.conversation.messages[..=index], false) {
        Ok(partial) if rendered.text.starts_with(&partial.text) && start <= partial.text.len() => {
            partial.text.len()
        }
        other => probe.end().ok_or_else(|| {
            let differently = |_| "the chat template renders it differently as the last one".to_owned();
            let cause =
                other.map_or_else(|fault| format!("with only the messages up to it, {fault}"), differently);
            undetermined(index, &cause)
        })?,
    };
    Ok(tokenized.answer(&(start..end.max(start))))
}

/// Returns where the text of an answer starts: after the prompt for it.
fn answer_start(chat: &Chat<'_>, rendered: &Rendered, index: usize) -> Result<usize, String> {
    prompt_len(chat, rendered, index).or_else(|cause| {
        let probe = Probe { chat, whole: &rendered.text, index };
        probe.start().ok_or_else(|| undetermined(index, &cause))
    })
}

/// Returns the length of the text up to an answer, if the whole text starts with the prompt for it.
fn prompt_len(chat: &Chat<'_>, rendered: &Rendered, index: usize) -> Result<usize, String> {
    if index == 0 {
        return Err("no message precedes it".to_owned());
    }
    let prompt = chat.render(&chat.conversation.messages[..index], true);
    let prompt = prompt.map_err(|fault| format!("with only the messages before it, {fault}"))?.text;
    match rendered.text.starts_with(&prompt) {
        true => Ok(prompt.len()),
        false => Err("without it, the chat template renders the messages before it differently".to_owned()),
    }
}

fn undetermined(index: usize, cause: &str) -> String {
    let message = index + 1;
    format!(
        "cannot tell which tokens of message {message} are the answer: {cause}. Mark them in the template by \
         {{% generation %}} (data.chat_template can name another template), or count all tokens: \
         data.loss_on = \"all\""
    )
}
