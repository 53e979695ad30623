//! `{% generation %}`: the blocks in which a template writes what the assistant says.
//!
//! Jinja has no such block; transformers adds it, and records where the text of a block starts and ends. The template
//! engine used here cannot be extended with statements, so the tags are rewritten to a filter, with a scope of its own,
//! that puts a mark before and after its input. The marks are removed again from the rendered text. They are Unicode
//! noncharacters, which do not occur in text.

use crate::chat::rendered::Rendered;

/// The marks before and after the assistant's text.
pub(super) const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// The filter that replaces the tags.
pub(super) const FILTER: &str = "_generation_";

/// The tags and their replacements, which stay on the same line.
const TAGS: [(&str, &str); 2] =
    [("generation", "filter _generation_ %}{% with"), ("endgeneration", "endwith %}{% endfilter")];

/// Rewrites the tags of a template, and returns whether it has any.
pub(super) fn rewrite(template: &str) -> (String, bool) {
    let mut out = String::with_capacity(template.len());
    let (mut rest, mut is_raw, mut has_tags) = (template, false, false);
    while let Some(at) = rest.find('{') {
        let (before, tail) = rest.split_at(at);
        out.push_str(before);
        let close = match tail.as_bytes().get(1) {
            Some(b'#') if !is_raw => "#}",
            Some(b'{') if !is_raw => "}}",
            Some(b'%') => "%}",
            _ => {
                out.push('{');
                rest = &tail[1..];
                continue;
            }
        };
        let inner = &tail[2..];
        let len = if close == "#}" { inner.find(close) } else { end_of(inner, close) };
        let Some(len) = len else { break };
        let (inner, after) = inner.split_at(len);
        let keyword = inner.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        let tag = TAGS.iter().find(|(tag, _)| close == "%}" && !is_raw && keyword == *tag);
        out.push_str(&tail[..2]);
        match tag {
            Some((tag, statement)) => {
                has_tags = true;
                out.push_str(&inner.replacen(tag, statement, 1));
            }
            None => out.push_str(inner),
        }
        if close == "%}" && matches!(keyword, "raw" | "endraw") {
            is_raw = keyword == "raw";
        }
        rest = after;
    }
    out.push_str(rest);
    (out, has_tags)
}

/// Returns where code ends, ignoring the contents of strings.
fn end_of(code: &str, close: &str) -> Option<usize> {
    let (bytes, mut at) = (code.as_bytes(), 0);
    let mut quote = None;
    while at < bytes.len() {
        match (quote, bytes[at]) {
            (Some(_), b'\\') => at += 1,
            (Some(open), byte) if byte == open => quote = None,
            (Some(_), _) => {}
            (None, byte @ (b'"' | b'\'')) => quote = Some(byte),
            (None, _) if bytes[at..].starts_with(close.as_bytes()) => return Some(at),
            (None, _) => {}
        }
        at += 1;
    }
    None
}

/// The filter [`FILTER`]: puts a text between marks.
pub(super) fn mark(text: &str) -> String {
    let [open, close] = MARKS;
    format!("{open}{text}{close}")
}

/// Removes the marks from a text and records their positions.
pub(super) fn unmark(marked: &str) -> Rendered {
    let mut rendered = Rendered { text: String::with_capacity(marked.len()), generated: Vec::new() };
    let (mut depth, mut start) = (0usize, 0);
    for c in marked.chars() {
        if c == MARKS[0] {
            if depth == 0 {
                start = rendered.text.len();
            }
            depth += 1;
        } else if c == MARKS[1] {
            depth = depth.saturating_sub(1);
            if depth == 0 {
                rendered.generated.push(start..rendered.text.len());
            }
        } else {
            rendered.text.push(c);
        }
    }
    rendered
}

#[cfg(test)]
mod tests;
