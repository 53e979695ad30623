//! Why a conversation has no tokens.

/// Instructions of the template engine for one rendering: some seconds. A message takes about a hundred.
pub(super) const FUEL: u64 = 50_000_000;

/// Why a template makes no text of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(not(feature = "tokenizers"), expect(dead_code, reason = "no template is rendered"))]
pub(in crate::data) enum RenderFault {
    /// What the template says by `raise_exception`.
    #[error("the chat template refuses it: {0}")]
    Refused(String),
    /// The template takes longer than any should.
    #[error(
        "the chat template does not end within {FUEL} instructions: is there a loop in it, or is this not one conversation?"
    )]
    Endless,
    /// The template asks for the date.
    #[error("the chat template writes today's date; data.date must say which, such as \"2024-07-26\"")]
    Date,
    /// The messages hold what a text is marked with.
    #[error("it holds the character U+{0:04X}, which Unicode keeps out of texts; remove it")]
    Noncharacter(u32),
    /// The template can not do with the messages what it wants to.
    #[error("the chat template fails in line {line}: {reason}")]
    Failed {
        /// The line of the template, from 1.
        line: usize,
        /// Why.
        reason: String,
    },
}
