//! What a template makes of a conversation.

use std::ops::Range;

/// A rendered text, and which parts of it the assistant says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rendered {
    /// The text.
    pub(super) text: String,
    /// Byte ranges, in order, written by `{% generation %}` blocks.
    pub(super) generated: Vec<Range<usize>>,
}
