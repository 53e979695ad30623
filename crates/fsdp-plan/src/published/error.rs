//! What is wrong with files of runs.

use super::columns::NEEDED;

/// What is wrong with a file of runs.
#[derive(Debug, thiserror::Error)]
pub enum RowError {
    /// A column is missing.
    #[error("{origin}: there is no column `{column}`; a file of runs has {}", NEEDED.join(", "))]
    Column {
        /// The file.
        origin: String,
        /// The column.
        column: &'static str,
    },
    /// A column is there twice.
    #[error("{origin}: column `{column}` is there twice, as number {first} and {second}; leave one of them")]
    Twice {
        /// The file.
        origin: String,
        /// The column.
        column: String,
        /// Where it is, from 1.
        first: usize,
        /// And where again.
        second: usize,
    },
    /// A column is called almost as one that is not there.
    #[error("{origin}: there is a column `{column}`; did you mean `{meant}`? If not, call it otherwise")]
    Misspelt {
        /// The file.
        origin: String,
        /// The column.
        column: String,
        /// The one that is not there.
        meant: &'static str,
    },
    /// There is a header and nothing else.
    #[error("{origin}: there is no run below the names of the columns")]
    Empty {
        /// The file.
        origin: String,
    },
    /// A line has more or fewer values than there are columns.
    #[error(
        "{origin}: line {line} has {found} values for {} columns: {} (a quote that is not closed, or a comma without quotes?)",
        columns.len(),
        of_lengths(columns, *found)
    )]
    Length {
        /// The file.
        origin: String,
        /// The line, from 1.
        line: u64,
        /// Its values.
        found: usize,
        /// The columns.
        columns: Vec<String>,
    },
    /// A value is not what its column holds.
    #[error("{origin}: line {line}, column `{column}`: \"{value}\" is no {expected}")]
    Number {
        /// The file.
        origin: String,
        /// The line, from 1.
        line: u64,
        /// The column.
        column: &'static str,
        /// What is there.
        value: String,
        /// What belongs there.
        expected: &'static str,
    },
    /// It is no CSV.
    #[error("{origin}: {source}")]
    Csv {
        /// The file.
        origin: String,
        /// What and where.
        source: csv::Error,
    },
}

/// Which column has no value, or comes before those that are too many.
fn of_lengths(columns: &[String], found: usize) -> String {
    match (columns.get(found), columns.last()) {
        (Some(column), _) => format!("none for `{column}`"),
        (None, last) => format!("more than up to `{}`", last.map_or("", String::as_str)),
    }
}
