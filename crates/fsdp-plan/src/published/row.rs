//! Lines of a CSV of runs.

use std::collections::BTreeMap;

/// The columns that a file must have; others are ignored.
const COLUMNS: [&str; 24] = [
    "source",
    "model",
    "params",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "seq",
    "micro_batch",
    "global_batch_tokens",
    "devices",
    "device_type",
    "sharding",
    "precision",
    "act_ckpt",
    "compile",
    "step_time_ms",
    "tokens_per_s_per_device",
    "tflops_per_device",
    "mfu",
    "peak_mem_gib",
    "row",
];

/// The columns that hold numbers, or nothing.
const NUMBERS: [&str; 17] = [
    "params",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "seq",
    "micro_batch",
    "global_batch_tokens",
    "devices",
    "step_time_ms",
    "tokens_per_s_per_device",
    "tflops_per_device",
    "mfu",
    "peak_mem_gib",
    "row",
];

/// One run, as it is written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    text: BTreeMap<String, String>,
    numbers: BTreeMap<String, f64>,
}

/// What is wrong with a file of runs.
#[derive(Debug, thiserror::Error)]
pub enum RowError {
    /// A column is missing.
    #[error("{origin}: there is no column `{column}`; a file of runs has {}", COLUMNS.join(", "))]
    Column {
        /// The file.
        origin: String,
        /// The column.
        column: &'static str,
    },
    /// A value is no number.
    #[error("{origin}: line {line}, column `{column}`: \"{value}\" is no number of at least 0")]
    Number {
        /// The file.
        origin: String,
        /// The line, from 1.
        line: u64,
        /// The column.
        column: String,
        /// What is there.
        value: String,
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

/// Reads the runs of a file, which `origin` names in errors.
///
/// # Errors
/// [`RowError`]: it is no CSV, lacks a column, or has something else where a number belongs.
pub fn read(text: &str, origin: &str) -> Result<Vec<Row>, RowError> {
    let malformed = |source| RowError::Csv { origin: origin.to_owned(), source };
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let header: Vec<String> =
        reader.headers().map_err(malformed)?.iter().map(|name| name.trim().to_owned()).collect();
    if let Some(&column) = COLUMNS.iter().find(|column| !header.iter().any(|name| name == **column)) {
        return Err(RowError::Column { origin: origin.to_owned(), column });
    }
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(malformed)?;
        let line = record.position().map_or(0, csv::Position::line);
        let text: BTreeMap<String, String> =
            header.iter().cloned().zip(record.iter().map(|value| value.trim().to_owned())).collect();
        let mut numbers = BTreeMap::new();
        for column in NUMBERS {
            let value = &text[column];
            if value.is_empty() {
                continue;
            }
            let number = value.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
            let wrong = || RowError::Number {
                origin: origin.to_owned(),
                line,
                column: column.to_owned(),
                value: value.clone(),
            };
            numbers.insert(column.to_owned(), number.ok_or_else(wrong)?);
        }
        rows.push(Row { text, numbers });
    }
    Ok(rows)
}

impl Row {
    /// What a column says; empty where it says nothing.
    pub fn text(&self, column: &str) -> &str {
        self.text.get(column).map_or("", String::as_str)
    }

    /// The number of a column, if it has one that is not 0.
    pub fn number(&self, column: &str) -> Option<f64> {
        self.numbers.get(column).copied().filter(|number| *number > 0.0)
    }

    /// What the column `row` says: a number where it is one.
    pub fn id(&self) -> serde_json::Value {
        match self.numbers.get("row") {
            Some(number) if number.fract() == 0.0 => serde_json::Value::from(*number as i64),
            Some(number) => serde_json::Value::from(*number),
            None => serde_json::Value::Null,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_not_be_read_is_named_by_line_and_column() {
        let header = COLUMNS.join(",");
        let line = |hidden: &str| {
            format!("s,m,,2,{hidden},4,4,64,100,32,1,,8,A100-80GB,fsdp2(zero3),bf16,none,no,10,,,,,1")
        };
        let rows = read(&format!("{header}\n{}\n", line("32")), "runs.csv").unwrap();
        assert_eq!(
            (rows[0].number("hidden"), rows[0].number("mfu"), rows[0].id()),
            (Some(32.0), None, 1.into())
        );
        let error = read(&format!("{header}\n{}\n{}\n", line("32"), line("wide")), "runs.csv")
            .unwrap_err()
            .to_string();
        assert_eq!(error, "runs.csv: line 3, column `hidden`: \"wide\" is no number of at least 0");
        let error = read(&header.replace("heads,", ""), "runs.csv").unwrap_err().to_string();
        assert!(error.contains("there is no column `heads`"), "{error}");
        let error = read(&format!("{header}\n1,2\n"), "runs.csv").unwrap_err().to_string();
        assert!(error.contains("line: 2"), "{error}");
    }
}
