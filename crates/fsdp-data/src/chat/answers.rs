//! Finds the tokens of a conversation that the model should learn to say.

use std::ops::Range;

use fsdp_config::LossOn;

use super::said::Said;
use super::script::{Last, Script};
use super::setup::Setup;
use crate::tokenizer::{Encoded, Tokenizer};

/// Tokens, and the text that they were made from.
pub(super) struct Tokenized<'a> {
    pub(super) text: &'a str,
    pub(super) tokens: Encoded,
    pub(super) tokenizer: &'a Tokenizer,
    /// The tokens at which generation stops.
    pub(super) stops: &'a [u32],
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

    /// Returns a special token: the last token of an answer or block, ignoring white space after it, or else the next token
    /// after that, ignoring white space before it. Some templates write the token that ends an answer outside of their
    /// `{% generation %}` blocks. Others end an answer only by the token that begins the next message, and that is where
    /// generation stops, too.
    ///
    /// If only the token after it stops generation, the other one belongs to the answer, such as the end of a tool call. So
    /// does a token at the end of the message itself, which says nothing about where answers end, unless it stops generation,
    /// and the next token neither does nor is written after answers.
    fn closing(&self, said: &Said, tokens: &Range<usize>) -> Option<usize> {
        let is_special = |&token: &usize| self.tokenizer.is_special(self.tokens.ids[token]);
        let is_stop = |token: usize| self.stops.contains(&self.tokens.ids[token]);
        let offsets = &self.tokens.offsets;
        let last = tokens.clone().rev().find(|&token| self.is_visible(token)).filter(is_special);
        let mut after = tokens.end..self.tokens.ids.len();
        let next = after.find(|&token| self.is_visible(token)).filter(is_special);
        let is_end = |next: usize| match last {
            None => true,
            Some(last) => {
                let is_of_message = offsets[last].start < said.message_end;
                let closes = is_stop(next) || said.is_closed;
                !is_stop(last) && (is_stop(next) || is_of_message) || is_of_message && closes
            }
        };
        next.filter(|&next| is_end(next)).or(last)
    }

    /// Returns the tokens of an answer. White space after the token that ends it belongs to the template.
    fn answer(&self, said: &Said) -> Answer {
        let tokens = self.within(&said.bytes);
        match self.closing(said, &tokens) {
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
    fn block(&self, said: &Said) -> Answer {
        let Answer { tokens, end } = self.answer(said);
        Answer { tokens: tokens.start..tokens.end.max(self.within(&said.bytes).end), end }
    }
}

/// Returns which tokens of a conversation count.
pub(super) fn find(script: &Script, tokenized: &Tokenized<'_>, setup: &Setup) -> Answers {
    let Setup { loss_on, counts_reasoning, .. } = *setup;
    let left_out: Vec<Answer> = script.left_out.iter().map(|said| tokenized.answer(said)).collect();
    let learned = script.learned.iter();
    let found: Vec<Answer> = if script.has_blocks {
        let is_apart = |one: &Answer, other: &Answer| {
            one.tokens.end <= other.tokens.start || other.tokens.end <= one.tokens.start
        };
        let blocks = learned.map(|said| tokenized.block(said));
        blocks.filter(|block| left_out.iter().all(|answer| is_apart(block, answer))).collect()
    } else {
        learned.map(|said| tokenized.answer(said)).collect()
    };
    let mut counts = vec![loss_on == LossOn::All; tokenized.tokens.ids.len()];
    for answer in &left_out {
        counts[answer.tokens.clone()].fill(false);
    }
    for answer in &found {
        counts[answer.tokens.clone()].fill(true);
        if !counts_reasoning {
            counts[tokenized.reasoning(&answer.tokens)].fill(false);
        }
    }
    let is_open = loss_on != LossOn::All && is_open(script, tokenized, &found);
    Answers { counts, is_open }
}

/// Whether there are answers that count, none of which ends with a token that stops generation.
fn is_open(script: &Script, tokenized: &Tokenized<'_>, found: &[Answer]) -> bool {
    let Tokenized { tokenizer, stops, .. } = tokenized;
    let mut ends = found.iter().filter_map(|answer| answer.end);
    if found.is_empty() || ends.clone().any(|id| stops.contains(&id)) {
        return false;
    }
    // Another token may be the beginning of the next message, which is missing after the last answer alone.
    match &script.last {
        Last::None => true,
        Last::End { counts } => {
            let is_closed = *counts && found.last().is_some_and(|answer| answer.end.is_some());
            !is_closed && !ends.any(|id| ends_with(tokenizer, &script.text, id))
        }
        Last::Followed(up_to) => {
            up_to.as_ref().is_some_and(|up_to| !ends.any(|id| ends_with(tokenizer, up_to, id)))
        }
    }
}

/// Whether a text ends with a token, ignoring white space after it.
fn ends_with(tokenizer: &Tokenizer, text: &str, id: u32) -> bool {
    tokenizer.decode(&[id]).is_ok_and(|token| text.trim_end().ends_with(token.trim_end()))
}
