//! What a command says: a [`Report`], with a JSON form for programs, that people read as text or as an HTML page.
//!
//! A report writes itself once, to a [`Document`]: lines, pairs, tables and figures, in sections. [`Text`](text::Text) and
//! [`Page`] lay them out.

pub(crate) mod bars;
pub(crate) mod chart;
pub(crate) mod page;
pub(crate) mod text;
pub(crate) mod timeline;

use std::fmt::Display;

use serde::Serialize;
use serde_json::Value;

use crate::error::CliError;
use crate::output::{self, one_line};
use page::Page;

/// What a command has found.
pub(crate) trait Report {
    /// For programs.
    fn json(&self) -> Value;

    /// For people.
    fn write(&self, to: &mut dyn Document);
}

/// Prints a report, as JSON or as text.
///
/// # Errors
/// [`CliError::Write`].
pub(crate) fn print(report: &impl Report, is_json: bool) -> Result<(), CliError> {
    output::print(&rendered(report, is_json))
}

/// A report as JSON or as text.
pub(crate) fn rendered(report: &impl Report, is_json: bool) -> String {
    if is_json { format!("{:#}\n", report.json()) } else { text::of_stdout(|to| report.write(to)) }
}

/// A value that is its own JSON form.
pub(crate) fn json(value: &impl Serialize) -> Value {
    serde_json::to_value(value).expect("reports are plain data")
}

/// What a mark means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    Good,
    Bad,
    Warning,
    Heading,
    Plain,
}

/// What a report is written to.
pub(crate) trait Document {
    /// Begins a section.
    fn section(&mut self, title: &str);

    /// Adds a line that begins with a marked text. Line breaks in it stay.
    fn marked(&mut self, mark: Mark, begin: &str, rest: &str);

    /// Adds space.
    fn gap(&mut self);

    /// Adds names and values, a pair per line; of text, `width` is the column of the values.
    fn pairs(&mut self, width: usize, rows: &[[String; 2]]);

    /// Adds a table.
    fn grid(&mut self, header: Vec<String>, rows: Vec<Vec<String>>);

    /// Adds text of several lines.
    fn block(&mut self, text: &str);

    /// Adds a figure. Text has none.
    fn figure(&mut self, _draw: &dyn Fn(&mut Page)) {}
}

/// Width of names in most lists.
const WIDTH: usize = 14;

impl dyn Document + '_ {
    /// Adds a line.
    pub(crate) fn line(&mut self, text: &str) {
        self.marked(Mark::Plain, "", &one_line(text));
    }

    /// Adds items of a list.
    pub(crate) fn list(&mut self, items: impl IntoIterator<Item = impl Display>) {
        items.into_iter().for_each(|item| self.line(&format!("- {item}")));
    }

    /// Adds a name and its value.
    pub(crate) fn pair(&mut self, name: &str, value: impl Display) {
        self.pairs(WIDTH, &[[name.to_owned(), value.to_string()]]);
    }

    /// Adds a line for each text, with a mark before it.
    pub(crate) fn each(&mut self, mark: Mark, begin: &str, texts: impl IntoIterator<Item = impl Display>) {
        texts.into_iter().for_each(|text| self.marked(mark, begin, &one_line(&format!(" {text}"))));
    }

    /// Adds a table.
    pub(crate) fn table<const COLUMNS: usize>(
        &mut self,
        header: [&str; COLUMNS],
        rows: impl IntoIterator<Item = [String; COLUMNS]>,
    ) {
        self.grid(header.map(str::to_owned).into(), rows.into_iter().map(Vec::from).collect());
    }

    /// Adds a table below a space, if there are rows.
    pub(crate) fn table_of_any<const COLUMNS: usize>(
        &mut self,
        header: [&str; COLUMNS],
        rows: impl IntoIterator<Item = [String; COLUMNS]>,
    ) {
        let mut rows = rows.into_iter().peekable();
        if rows.peek().is_some() {
            self.gap();
            self.table(header, rows);
        }
    }
}
