//! Colors of text on terminals.

use std::io::IsTerminal;

use super::escape::shown;

/// The escape sequences that [`Paint`] writes.
const CODES: [&str; 6] = ["\x1b[2m", "\x1b[32m", "\x1b[1;31m", "\x1b[33m", "\x1b[1m", "\x1b[0m"];

/// Colors, if enabled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Paint {
    pub(super) is_on: bool,
}

impl Paint {
    /// Enables colors if `stream` is a terminal and the user has not set `NO_COLOR`.
    pub(crate) fn of(stream: &impl IsTerminal) -> Self {
        let is_disabled = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self { is_on: stream.is_terminal() && !is_disabled }
    }

    /// Enables none.
    #[cfg(test)]
    pub(crate) fn none() -> Self {
        Self { is_on: false }
    }

    /// Marks something good.
    pub(crate) fn good(self, text: &str) -> String {
        self.paint("32", text)
    }

    /// Marks something bad.
    pub(crate) fn bad(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    /// Marks something to look at.
    pub(crate) fn warning(self, text: &str) -> String {
        self.paint("33", text)
    }

    /// Marks something secondary.
    pub(crate) fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    /// Marks a heading.
    pub(crate) fn heading(self, text: &str) -> String {
        self.paint("1", text)
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.is_on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// Escapes text for display; only the sequences of `Paint` remain, if enabled.
    pub(super) fn shown(self, mut text: &str) -> String {
        let mut out = String::new();
        while let Some(at) = text.find('\x1b').filter(|_| self.is_on) {
            let code = CODES.into_iter().find(|code| text[at..].starts_with(code));
            out += &shown(&text[..at]);
            out += code.unwrap_or("\\u001b");
            text = &text[at + code.map_or(1, str::len)..];
        }
        out + &shown(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paint_is_plain_when_off() {
        assert_eq!(Paint { is_on: false }.bad("x"), "x");
        assert_eq!(Paint { is_on: true }.bad("x"), "\x1b[1;31mx\x1b[0m");
    }

    #[test]
    fn only_color_sequences_pass_through() {
        let paint = Paint { is_on: true };
        let painted = [paint.good("a"), paint.bad("b"), paint.warning("c"), paint.heading("d")]
            .join("\x1b[2J\x1b]0;x\x07");
        let expected = painted.replace("\x1b[2J\x1b]0;x\x07", r"\u001b[2J\u001b]0;x\u0007");
        assert_eq!(paint.shown(&painted), expected);
        assert_eq!(Paint { is_on: false }.shown("\x1b[32ma"), r"\u001b[32ma");
    }
}
