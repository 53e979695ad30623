//! The lines of a run file: keys with where their values come from, and keys that have to be filled in.

use std::fmt::Write as _;

use crate::toml_text::commented;

/// How a line begins that the folder says nothing of.
pub(super) const OPEN: &str = "# fill in: ";

/// A line of a table.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Line {
    /// A key with its value in TOML's form, and a comment; an example of a value if the folder does not say it.
    Key { key: &'static str, value: String, comment: String, is_open: bool },
    /// A comment.
    Note(String),
}

impl Line {
    /// A value, and the file and the key in it that say so.
    pub(super) fn known(key: &'static str, value: impl ToString, from: impl Into<String>) -> Self {
        Self::Key { key, value: value.to_string(), comment: from.into(), is_open: false }
    }

    /// An example of a value that the folder does not say, and where the program has it.
    pub(super) fn open(key: &'static str, example: impl ToString, place: impl Into<String>) -> Self {
        Self::Key { key, value: example.to_string(), comment: place.into(), is_open: true }
    }

    /// Why a key is not there.
    pub(super) fn note(text: String) -> Self {
        Self::Note(text)
    }
}

/// The lines of a table.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Lines(pub(super) Vec<Line>);

impl Lines {
    /// Whether no line has to be filled in.
    pub(super) fn is_known(&self) -> bool {
        !self.0.iter().any(|line| matches!(line, Line::Key { is_open: true, .. }))
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for line in &self.0 {
            let _ = match line {
                Line::Key { key, value, comment, is_open } => {
                    let key = format!("{}{key} = {value}", if *is_open { OPEN } else { "" });
                    writeln!(text, "{}", commented(&key, comment))
                }
                Line::Note(note) => writeln!(text, "# {note}"),
            };
        }
        text
    }
}

/// A whole run file.
pub(super) struct RunFile {
    /// The folder that it was made from.
    pub(super) name: String,
    pub(super) program: &'static str,
    /// Tables with their names; those without lines are left out.
    pub(super) tables: Vec<(&'static str, Lines)>,
    /// Entries of `[[train.optimizer.group]]`.
    pub(super) groups: Vec<Lines>,
}

impl RunFile {
    pub(super) fn text(&self) -> String {
        let mut text = format!(
            "# For `fsdp audit`: the step after `{}` ({}), as the folder describes it.\n\
             # A comment says where each value comes from. It is what the program has saved: is it what you meant?\n\
             # Lines that begin with `{}` are what the folder does not say; without them, defaults apply.\n",
            self.name,
            self.program,
            OPEN.trim_end()
        );
        for (name, lines) in self.tables.iter().filter(|(_, lines)| !lines.0.is_empty()) {
            let _ = write!(text, "\n[{name}]\n{}", lines.text());
            if *name == "train.optimizer" {
                for group in &self.groups {
                    let _ = write!(text, "\n[[train.optimizer.group]]\n{}", group.text());
                }
            }
        }
        text
    }
}

/// A number as a run file has it: the shortest text that is the same number.
pub(super) fn number(value: f64) -> String {
    match value.abs() {
        size if size != 0.0 && !(1e-3..1e6).contains(&size) => format!("{value:e}"),
        _ => format!("{value:?}"),
    }
}
