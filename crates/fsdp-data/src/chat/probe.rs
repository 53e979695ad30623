//! Finds an answer in the text of a whole conversation by putting another text in its place.
//!
//! Templates for models that reason write an answer differently depending on what follows it: the reasoning of earlier
//! answers is left out, and the prompt for an answer may begin the reasoning already. What a template makes of the first
//! messages of a conversation is then no prefix of what it makes of all of them. If only the content of one message
//! changes, however, everything before and after it stays the same.

use std::ops::Range;

use serde_json::{Value, json};

use super::conversation::ASSISTANT;
use super::said::Said;
use super::script::Chat;
use super::template::{Prepared, prepare};

/// The text in place of a message: a Unicode noncharacter, which does not occur in text.
const STAND_IN: &str = "\u{fdd2}";

/// A search for one answer.
pub(super) struct Probe<'a> {
    pub(super) chat: &'a Chat<'a>,
    /// The text of the whole conversation.
    pub(super) whole: &'a str,
    /// Index of the message.
    pub(super) index: usize,
}

impl Probe<'_> {
    /// Returns where the answer starts: after the prompt for it. If the prompt does not stand in the text, because it
    /// begins reasoning that the template left out, the answer starts where that of an earlier message would, or else with
    /// its content. `None` if the template repeats the message or depends on its text otherwise.
    pub(super) fn start(&self) -> Option<usize> {
        let content = self.content(self.index)?;
        // Templates may leave out the message before, such as a system prompt.
        let before = (0..self.index).rev().find_map(|index| self.content(index));
        let turn = before.map_or(0, |before| before.end.min(content.start));
        let header = &self.whole[turn..content.end];
        let prompt = self.prompt().and_then(|prompt| Some((turn + header.find(&prompt)?, prompt.len())));
        Some(match prompt {
            Some((at, len)) if at <= content.start => at + len,
            _ => self.header_len(header).map_or(content.start, |len| content.start.min(turn + len)),
        })
    }

    /// Returns the answer, which starts at a byte of the text, with what the template writes after the last message if it
    /// writes that after this one, too. `None` as for the start.
    pub(super) fn said(&self, start: usize) -> Option<Said> {
        let message_end = self.content(self.index)?.end.max(start);
        let after = self.after().unwrap_or_default();
        let is_same = self.whole[message_end..].starts_with(&after);
        let end = message_end + if is_same { after.len() } else { 0 };
        Some(Said { bytes: start..end, message_end, is_closed: !after.trim().is_empty() })
    }

    /// Returns what the template writes after the message if it is the last one.
    pub(super) fn after(&self) -> Option<String> {
        let up_to = self.around(&self.chat.messages[..=self.index], self.index);
        up_to.map(|[_, after]| after)
    }

    /// Returns the bytes that depend on a message.
    pub(super) fn content(&self, index: usize) -> Option<Range<usize>> {
        self.chat.messages.get(index)?;
        let [before, after] = self.around(&self.chat.messages, index)?;
        let start = common(self.whole.chars(), before.chars());
        let end = self.whole.len() - common(self.whole.chars().rev(), after.chars().rev());
        (start <= end).then_some(start..end)
    }

    /// Returns the text before and after a message in a conversation.
    fn around(&self, messages: &[Prepared], index: usize) -> Option<[String; 2]> {
        let mut messages = messages.to_vec();
        messages[index] = prepare(&stand_in(&self.chat.conversation.messages[index]));
        let text = self.chat.render(&messages, false).ok()?.text;
        let (before, after) = text.split_once(STAND_IN)?;
        (!after.contains(STAND_IN)).then(|| [before, after].map(str::to_owned))
    }

    /// Returns what the template writes for the model to continue with this answer.
    fn prompt(&self) -> Option<String> {
        let before = &self.chat.messages[..self.index];
        let [plain, prompted] = [false, true].map(|prompt| self.chat.render(before, prompt));
        let (plain, prompted) = (plain.ok()?.text, prompted.ok()?.text);
        let prompt = prompted[common(prompted.chars(), plain.chars())..].to_owned();
        (!prompt.is_empty()).then_some(prompt)
    }

    /// Returns how much of a text is between the previous message and an answer that is followed by another question.
    fn header_len(&self, text: &str) -> Option<usize> {
        let mut messages = self.chat.messages[..=self.index].to_vec();
        messages.push(prepare(&json!({"role": "user", "content": "?"})));
        let found = self.around(&messages, self.index);
        let found = found.or_else(|| self.around(&self.chat.messages, self.index));
        let [before, _] = found?;
        let ends = before.char_indices().map(|(at, _)| &before[at..]);
        ends.filter(|end| end.len() <= text.len()).find(|end| text.starts_with(end)).map(str::len)
    }
}

/// Returns a message of the same role with nothing but the text [`STAND_IN`].
fn stand_in(message: &Value) -> Value {
    let text = match message["content"] {
        Value::Array(_) => json!([{"type": "text", "text": STAND_IN}]),
        _ => json!(STAND_IN),
    };
    let mut message = message.clone();
    if message["role"] == ASSISTANT {
        message = json!({"role": ASSISTANT});
    }
    message["content"] = text;
    message
}

/// Returns the number of bytes at the beginning of two texts that are the same.
fn common(one: impl Iterator<Item = char>, other: impl Iterator<Item = char>) -> usize {
    one.zip(other).take_while(|(one, other)| one == other).map(|(one, _)| one.len_utf8()).sum()
}
