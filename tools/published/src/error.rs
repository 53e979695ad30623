//! Errors in files of runs.

use crate::columns::NEEDED;

/// Errors in a file of runs.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RowError {
    /// A column is missing.
    #[error("{origin}: missing column `{column}`; a file of runs needs {}", NEEDED.join(", "))]
    Column {
        /// The file.
        origin: String,
        /// The column.
        column: &'static str,
    },
    /// A column occurs twice.
    #[error("{origin}: column `{column}` occurs twice, as number {first} and {second}; keep one of them")]
    Twice {
        /// The file.
        origin: String,
        /// The column.
        column: String,
        /// Its first position, from 1.
        first: usize,
        /// Its second position, from 1.
        second: usize,
    },
    /// A column's name is almost that of a missing column.
    #[error("{origin}: unknown column `{column}`; did you mean `{meant}`? If not, rename it")]
    Misspelt {
        /// The file.
        origin: String,
        /// The column.
        column: String,
        /// The missing column.
        meant: &'static str,
    },
    /// The file has a header and no runs.
    #[error("{origin}: there are no runs below the header")]
    Empty {
        /// The file.
        origin: String,
    },
    /// A line has more or fewer values than the header has columns.
    #[error(
        "{origin}: line {line} has {found} values for {} columns: {} (an unclosed quote, or an unquoted comma?)",
        columns.len(),
        of_lengths(columns, *found)
    )]
    Length {
        /// The file.
        origin: String,
        /// The line, from 1.
        line: u64,
        /// Number of values in the line.
        found: usize,
        /// The columns.
        columns: Vec<String>,
    },
    /// A value is not of the kind that its column requires.
    #[error("{origin}: line {line}, column `{column}`: \"{value}\" is not a {expected}")]
    Number {
        /// The file.
        origin: String,
        /// The line, from 1.
        line: u64,
        /// The column.
        column: &'static str,
        /// The value.
        value: String,
        /// The required kind of value.
        expected: &'static str,
    },
    /// The file is not valid CSV.
    #[error("{origin}: {source}")]
    Csv {
        /// The file.
        origin: String,
        /// The problem and its position.
        source: csv::Error,
    },
}

/// Names the first column without a value, or the last column if there are too many values.
fn of_lengths(columns: &[String], found: usize) -> String {
    match (columns.get(found), columns.last()) {
        (Some(column), _) => format!("none for `{column}`"),
        (None, last) => format!("extra values after `{}`", last.map_or("", String::as_str)),
    }
}
