//! Text for people: the report on stdout, everything else on stderr, colour only where it is read by eye.

use std::error::Error;
use std::io::{self, IsTerminal, Write};

use comfy_table::{CellAlignment, Table, TableComponent, presets};

use crate::error::CliError;

/// Prints text on stdout. A reader that has seen enough (`| head`) is no failure.
///
/// # Errors
/// [`CliError::Write`].
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(source) if source.kind() != io::ErrorKind::BrokenPipe => {
            Err(CliError::Write { what: "to stdout".to_owned(), source })
        }
        _ => Ok(()),
    }
}

/// Prints a line on stderr. Nothing can be done when that fails.
pub(crate) fn note(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Prints a warning on stderr.
pub(crate) fn warning(text: &str) {
    note(&format!("{} {text}", Paint::of(&io::stderr()).warning("warning:")));
}

/// Prints an error and what caused it on stderr.
pub(crate) fn error(error: &dyn Error) {
    let paint = Paint::of(&io::stderr());
    let mut text = error.to_string();
    note(&format!("{} {text}", paint.bad("error:")));
    let mut cause = error.source();
    while let Some(source) = cause {
        let next = source.to_string();
        // Many errors already say what caused them.
        if !text.contains(&next) {
            note(&format!("  caused by: {next}"));
        }
        text = next;
        cause = source.source();
    }
}

/// Colours, or none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Paint {
    is_on: bool,
}

impl Paint {
    /// Colours if `stream` is a terminal and the user has not set `NO_COLOR`.
    pub(crate) fn of(stream: &impl IsTerminal) -> Self {
        let is_refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self { is_on: stream.is_terminal() && !is_refused }
    }

    /// Something that is as it should be.
    pub(crate) fn good(self, text: &str) -> String {
        self.paint("32", text)
    }

    /// Something that is not.
    pub(crate) fn bad(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    /// Something to look at.
    pub(crate) fn warning(self, text: &str) -> String {
        self.paint("33", text)
    }

    /// A heading.
    pub(crate) fn heading(self, text: &str) -> String {
        self.paint("1", text)
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.is_on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// A table: names on the left, numbers on the right.
pub(crate) fn table<const COLUMNS: usize>(
    header: [&str; COLUMNS],
    rows: impl IntoIterator<Item = [String; COLUMNS]>,
) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header).add_rows(rows);
    table
        .set_style(TableComponent::HeaderLines, '─')
        .set_style(TableComponent::MiddleHeaderIntersections, '─');
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_align_numbers_right() {
        let text = table(["name", "bytes"], [["a".into(), "7".into()], ["b".into(), "1234".into()]]);
        assert!(text.contains("    7"), "{text}");
    }

    #[test]
    fn paint_is_plain_when_off() {
        assert_eq!(Paint { is_on: false }.bad("x"), "x");
        assert_eq!(Paint { is_on: true }.bad("x"), "\x1b[1;31mx\x1b[0m");
    }
}
