//! Where the assistant speaks in a text, and what the template writes after it.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::probe::Probe;
use super::script::Chat;

/// What the assistant says, in bytes of a text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Said {
    /// An answer, with what the template writes after it, or a `{% generation %}` block.
    pub(super) bytes: Range<usize>,
    /// The end of what depends on the message. What follows in `bytes`, the template writes after any answer.
    pub(super) message_end: usize,
    /// Whether the template writes something after the last message, so what follows `bytes` belongs to the answer, too.
    pub(super) is_closed: bool,
}

impl Said {
    /// Without the end of what depends on the message, all of it may be what the template writes.
    pub(super) fn new(bytes: Range<usize>, message_end: Option<usize>) -> Said {
        let message_end = message_end.unwrap_or(bytes.start).clamp(bytes.start, bytes.end);
        Said { bytes, message_end, is_closed: false }
    }

    /// Returns an answer that begins at a byte of a text, which ends with it.
    pub(super) fn last(chat: &Chat<'_>, text: &str, start: usize, index: usize) -> Said {
        let bytes = start..text.len();
        let found = || Some(text.strip_suffix(&Probe { chat, whole: text, index }.after()?)?.len());
        let message_end = message_end(chat, text, &bytes, index, found);
        Said::new(bytes, message_end)
    }

    /// Returns a block that is one answer of a text.
    pub(super) fn block(chat: &Chat<'_>, text: &str, bytes: &Range<usize>, index: usize) -> Said {
        let found = || Some(Probe { chat, whole: text, index }.content(index)?.end);
        let message_end = message_end(chat, text, bytes, index, found);
        Said::new(bytes.clone(), message_end)
    }

    /// Returns blocks of a text, each of which may be a part of one of several answers.
    pub(super) fn parts(
        chat: &Chat<'_>,
        text: &str,
        blocks: &[Range<usize>],
        answers: &[usize],
    ) -> Vec<Said> {
        let is_open = |bytes: &&Range<usize>| !has_stop(chat, &text[(*bytes).clone()]);
        let answers = answers.iter().filter(|_| blocks.iter().any(|bytes| is_open(&bytes)));
        let messages = answers.filter_map(|&index| Probe { chat, whole: text, index }.content(index));
        let messages: Vec<Range<usize>> = messages.collect();
        let end = |bytes: &Range<usize>| {
            let is_here = |message: &&Range<usize>| message.start < bytes.end && message.end >= bytes.start;
            messages.iter().rfind(is_here).map(|message| message.end)
        };
        blocks.iter().map(|bytes| Said::new(bytes.clone(), end(bytes))).collect()
    }
}

/// Returns the end of what depends on a message in an answer or block of a text: as [`found`](Probe) by rendering another text,
/// unless it can be seen. `None` if that fails. Also if the text ends with a token that stops generation, which the template
/// has most likely written: rendering takes time.
fn message_end(
    chat: &Chat<'_>,
    text: &str,
    bytes: &Range<usize>,
    index: usize,
    found: impl FnOnce() -> Option<usize>,
) -> Option<usize> {
    let said = &text[bytes.clone()];
    match verbatim_end(&chat.conversation.messages[index], said) {
        Some(end) => Some(bytes.start + end),
        None if has_stop(chat, said) => None,
        None => found(),
    }
}

/// Returns the end of a message's content in a text, if the message has nothing else, and the content stands there once.
fn verbatim_end(message: &Value, said: &str) -> Option<usize> {
    let fields = message.as_object()?;
    let content = message["content"].as_str().filter(|_| fields.len() == 2)?;
    // Templates may leave out reasoning.
    let content = content.rsplit("</think>").next()?.trim();
    let at = said.find(content).filter(|&at| !content.is_empty() && said.rfind(content) == Some(at))?;
    Some(at + content.len())
}

/// Whether a text ends with a token that stops generation.
fn has_stop(chat: &Chat<'_>, said: &str) -> bool {
    let said = said.trim_end();
    chat.setup.stops.iter().any(|stop| said.ends_with(stop.trim_end()))
}
