//! A report as text: tables of aligned columns, colors only on terminals.

use std::fmt::Write;
use std::io;

use comfy_table::{CellAlignment, Table, TableComponent, presets};

use super::{Document, Mark};
use crate::output::{Paint, one_line};

/// A report as text.
pub(crate) struct Text {
    text: String,
    paint: Paint,
}

impl Text {
    /// The text that `write` writes.
    pub(crate) fn of(paint: Paint, write: impl FnOnce(&mut dyn Document)) -> String {
        let mut to = Self { text: String::new(), paint };
        write(&mut to);
        to.text
    }
}

/// What `write` writes, as stdout shows it.
pub(crate) fn of_stdout(write: impl FnOnce(&mut dyn Document)) -> String {
    Text::of(Paint::of(&io::stdout()), write)
}

impl Document for Text {
    fn section(&mut self, title: &str) {
        self.gap();
        self.marked(Mark::Heading, title, "");
    }

    fn marked(&mut self, mark: Mark, begin: &str, rest: &str) {
        let begin = match mark {
            Mark::Good => self.paint.good(begin),
            Mark::Bad => self.paint.bad(begin),
            Mark::Warning => self.paint.warning(begin),
            Mark::Heading => self.paint.heading(begin),
            Mark::Plain => begin.to_owned(),
        };
        let _ = writeln!(self.text, "{begin}{rest}");
    }

    fn gap(&mut self) {
        self.text.push('\n');
    }

    fn pairs(&mut self, width: usize, rows: &[[String; 2]]) {
        for [name, value] in rows {
            let _ = writeln!(self.text, "{:<width$}{}", one_line(name), one_line(value));
        }
    }

    fn grid(&mut self, header: Vec<String>, rows: Vec<Vec<String>>) {
        self.text += &grid(header, rows);
    }

    fn block(&mut self, text: &str) {
        self.text += text;
    }
}

/// Formats a table: words are left-aligned, numbers right-aligned.
fn grid(header: Vec<String>, rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    let shown = |row: Vec<String>| row.into_iter().map(|cell| one_line(&cell)).collect::<Vec<_>>();
    let (header, rows): (_, Vec<_>) = (shown(header), rows.into_iter().map(shown).collect());
    let begins_with_digit = |cell: &String| {
        cell.trim_start_matches(['+', '-', '~', '$']).starts_with(|first: char| first.is_ascii_digit())
    };
    let has_numbers = |column: usize| rows.iter().filter_map(|row| row.get(column)).any(begins_with_digit);
    table.load_preset(presets::NOTHING).set_header(header).add_rows(rows.clone());
    table
        .set_style(TableComponent::HeaderLines, '─')
        .set_style(TableComponent::MiddleHeaderIntersections, '─');
    for (_, column) in table.column_iter_mut().enumerate().skip(1).filter(|&(column, _)| has_numbers(column))
    {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table<const COLUMNS: usize>(header: [&str; COLUMNS], rows: &[[&str; COLUMNS]]) -> String {
        let rows = rows.iter().map(|row| row.map(str::to_owned));
        Text::of(Paint::none(), |to| to.table(header, rows))
    }

    #[test]
    fn tables_align_numbers_right_and_words_left() {
        let rows = [["a", "+7", "x"], ["b", "1234", "long"]];
        insta::assert_snapshot!(table(["name", "bytes", "kind"], &rows), @r"
         name   bytes   kind
        ─────────────────────
         a         +7   x
         b       1234   long
        ");
    }

    #[test]
    fn table_cells_stay_on_one_line() {
        let text = table(["name"], &[["a\nb\u{202e}"]]);
        assert!(text.ends_with("a\\nb\\u202e\n"), "{text}");
    }
}
