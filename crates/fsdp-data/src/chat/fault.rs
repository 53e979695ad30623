//! Reasons why a conversation, or another record, cannot be turned into tokens.

use serde::{Deserialize, Serialize};

use crate::error::DataError;

/// Limit on the instructions of the template engine per rendering: some seconds. A message takes about a hundred.
pub(super) const FUEL: u64 = 50_000_000;

/// Maximum number of characters of a message that a template chooses.
const SHOWN_CHARS: usize = 500;

/// Reasons why a template does not render a conversation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(not(feature = "tokenizers"), expect(dead_code, reason = "no template is rendered"))]
pub(crate) enum RenderFault {
    /// The template called `raise_exception` with this message.
    #[error("the chat template rejects it: {0}")]
    Rejected(String),
    /// The template exceeds the limit on instructions.
    #[error(
        "the chat template does not end within {FUEL} instructions: is there a loop in it, or is this not one conversation?"
    )]
    Endless,
    /// The template asks for the date.
    #[error("the chat template writes today's date; set data.date to one, such as \"2024-07-26\"")]
    Date,
    /// The messages contain one of the characters that mark answers in a rendered text.
    #[error("it contains U+{0:04X}, a Unicode noncharacter; remove it")]
    Noncharacter(u32),
    /// The template uses a value of a table that has no JSON form; says which and why.
    #[error(
        "the chat template uses a value that has no JSON form: {0}, or choose a data.chat_template that does without it"
    )]
    Odd(String),
    /// The template fails on the messages.
    #[error("the chat template fails at line {line}: {reason}")]
    Failed {
        /// The line of the template, from 1.
        line: usize,
        /// The error message.
        reason: String,
    },
}

/// Reasons why a conversation has no [`Script`](super::script::Script).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub(crate) enum ScriptFault {
    /// The conversation is at fault.
    #[error("{0}")]
    Record(String),
    /// The template took more than it may. It would for other conversations, too, so no other is tried.
    #[error("{0}")]
    Excess(String),
}

/// Reasons why a record has no tokens.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EncodeFault {
    /// The fault is not in the record: no record of this kind can be tokenized.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The chat template is at fault; describes why.
    #[error("{0}")]
    Template(String),
    /// The record is at fault; describes why.
    #[error("{0}")]
    Record(String),
}

impl From<String> for EncodeFault {
    fn from(fault: String) -> EncodeFault {
        EncodeFault::Record(fault)
    }
}

impl From<ScriptFault> for EncodeFault {
    fn from(fault: ScriptFault) -> EncodeFault {
        match fault {
            ScriptFault::Record(fault) => EncodeFault::Record(fault),
            ScriptFault::Excess(fault) => EncodeFault::Template(fault),
        }
    }
}

/// Shortens a message that a template chooses.
#[cfg_attr(not(feature = "tokenizers"), expect(dead_code, reason = "no template is rendered"))]
pub(super) fn shown(mut message: String) -> String {
    if let Some((end, _)) = message.char_indices().nth(SHOWN_CHARS) {
        message.truncate(end);
        message.push_str(" ..");
    }
    message
}
