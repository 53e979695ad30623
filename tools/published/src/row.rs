//! Lines of a CSV file of runs.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::columns::Columns;
use crate::error::RowError;

/// The columns that hold whole numbers, or are empty.
const COUNTS: [&str; 8] = ["layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "devices"];

/// The columns that hold numbers, or are empty.
const NUMBERS: [&str; 3] = ["params", "micro_batch", "global_batch_tokens"];

/// The columns that hold measurements: a number above 0, empty, or [`OUT_OF_MEMORY`].
const MEASURED: [&str; 4] = ["step_time_ms", "tokens_per_s_per_device", "tflops_per_device", "peak_mem_gib"];

/// Values that count as empty, in lower case.
const EMPTY_VALUES: [&str; 8] = ["", "-", "\u{2013}", "\u{2014}", "?", "n/a", "na", "null"];

/// Also counts as empty, except in a measurement, where it is the result of a division by zero.
const NOT_A_NUMBER: &str = "nan";

/// Values in place of a measurement that mean that the run did not fit, in lower case.
const OUT_OF_MEMORY: [&str; 4] = ["oom", "out of memory", "out-of-memory", "cuda oom"];

/// One run, as written in the file.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Row {
    line: u64,
    text: BTreeMap<String, String>,
    numbers: BTreeMap<&'static str, f64>,
    is_out_of_memory: bool,
}

/// The contents of a file of runs.
#[derive(Clone, Debug)]
pub(crate) struct Runs {
    /// The runs, at least one.
    pub(crate) rows: Vec<Row>,
    /// Columns that are not known and therefore ignored.
    pub(crate) ignored: Vec<String>,
}

/// Reads the runs of a file; `origin` names the file in errors.
///
/// # Errors
/// [`RowError`]: the file is not CSV, lacks a column, or has something else where a number is required.
pub(crate) fn read(text: &str, origin: &str) -> Result<Runs, RowError> {
    let malformed = |source| RowError::Csv { origin: origin.to_owned(), source };
    // With CR LF line ends, the reader would count a record's line from before the LF of the previous line.
    let text = text.trim_start_matches('\u{feff}').replace("\r\n", "\n");
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(text.as_bytes());
    let Columns { names, unknown } = Columns::of(reader.headers().map_err(malformed)?, origin)?;
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(malformed)?;
        let (line, found) = (record.position().map_or(0, |begin| line_of(&text, begin)), record.len());
        if found != names.len() {
            return Err(RowError::Length { origin: origin.to_owned(), line, found, columns: names });
        }
        let values = record.iter().map(|value| value.trim().to_owned());
        let mut row = Row { line, text: names.iter().cloned().zip(values).collect(), ..Row::default() };
        row.read_numbers(origin)?;
        rows.push(row);
    }
    match rows.is_empty() {
        true => Err(RowError::Empty { origin: origin.to_owned() }),
        false => Ok(Runs { rows, ignored: unknown }),
    }
}

/// The line of a record. The reader reports the first of any empty lines before the record; these are skipped.
fn line_of(text: &str, begin: &csv::Position) -> u64 {
    let rest = usize::try_from(begin.byte()).ok().and_then(|byte| text.get(byte..)).unwrap_or_default();
    let empty = rest.bytes().take_while(|&byte| byte == b'\n').count();
    begin.line() + empty as u64
}

/// Whether a value counts as empty.
fn is_empty_value(column: &str, value: &str) -> bool {
    let value = value.to_lowercase();
    EMPTY_VALUES.contains(&value.as_str()) || (value == NOT_A_NUMBER && !MEASURED.contains(&column))
}

impl Row {
    fn read_numbers(&mut self, origin: &str) -> Result<(), RowError> {
        let clear_empty = |(column, value): (&String, &mut String)| {
            if is_empty_value(column, value) {
                value.clear();
            }
        };
        self.text.iter_mut().for_each(clear_empty);
        for column in COUNTS.into_iter().chain(NUMBERS).chain(MEASURED) {
            let value = self.text(column).to_owned();
            if value.is_empty() {
                continue;
            }
            let is_measured = MEASURED.contains(&column);
            if is_measured && OUT_OF_MEMORY.contains(&value.to_lowercase().as_str()) {
                self.is_out_of_memory = true;
                continue;
            }
            let is_count = COUNTS.contains(&column);
            let expected = match (is_measured, is_count) {
                (true, _) => "number above 0; leave it empty where nothing was measured",
                (false, true) => "whole number of at least 0",
                (false, false) => "number of at least 0",
            };
            let number = value.parse().ok().filter(|number: &f64| {
                let is_integral = !is_count || number.fract() == 0.0;
                number.is_finite() && *number >= 0.0 && is_integral && !(is_measured && *number == 0.0)
            });
            let (origin, line) = (origin.to_owned(), self.line);
            let number = number.ok_or(RowError::Number { origin, line, column, value, expected })?;
            self.numbers.insert(column, number);
        }
        Ok(())
    }

    /// The text of a column; empty if it has none, or the column does not exist.
    pub(crate) fn text(&self, column: &str) -> &str {
        self.text.get(column).map_or("", String::as_str)
    }

    /// The text of a column in lower case.
    pub(crate) fn word(&self, column: &str) -> String {
        self.text(column).to_lowercase()
    }

    /// The number of a column; `None` if it has none, or it is 0.
    pub(crate) fn number(&self, column: &str) -> Option<f64> {
        self.numbers.get(column).copied().filter(|number| *number > 0.0)
    }

    /// Returns those of the columns that are empty or 0.
    pub(crate) fn missing<'a>(&self, columns: &[&'a str]) -> Vec<&'a str> {
        let is_missing =
            |column: &&&str| self.text(column).is_empty() || self.numbers.get(**column) == Some(&0.0);
        columns.iter().filter(is_missing).copied().collect()
    }

    /// The identifier in the column `row`, as a number if it is one; the line number if the column is empty.
    pub(crate) fn id(&self) -> Value {
        let text = self.text("row");
        match (text.parse::<i64>(), text.parse::<f64>()) {
            (Ok(integer), _) => integer.into(),
            (_, Ok(number)) if number.is_finite() && number.fract() == 0.0 => (number as i64).into(),
            (_, Ok(number)) if number.is_finite() => number.into(),
            _ if text.is_empty() => self.line.into(),
            _ => text.into(),
        }
    }

    /// Whether the run has fitted: true if it was measured, false if it ran out of memory, `None` if not known.
    pub(crate) fn fitted(&self) -> Option<bool> {
        let is_measured = MEASURED.iter().any(|column| self.numbers.contains_key(column));
        (self.is_out_of_memory || is_measured).then_some(!self.is_out_of_memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::columns::NEEDED;

    const LINE: &str = "2,32,4,64,100,32,1,8,A100-80GB,fsdp2(zero3),none";

    fn of(header: &str, line: &str) -> Result<Vec<Row>, String> {
        let read = read(&format!("{header}\n{line}\n"), "runs.csv");
        read.map(|runs| runs.rows).map_err(|error| error.to_string())
    }

    #[test]
    fn unreadable_values_name_line_and_column() {
        let header = NEEDED.join(",");
        let wrong = |line: &str| of(&header, &format!("{LINE}\n{line}")).unwrap_err();
        assert_eq!(
            wrong(&LINE.replacen("32", "wide", 1)),
            "runs.csv: line 3, column `hidden`: \"wide\" is not a whole number of at least 0"
        );
        assert_eq!(
            wrong(&LINE.replacen(",4,", ",0.5,", 1)),
            "runs.csv: line 3, column `heads`: \"0.5\" is not a whole number of at least 0"
        );
        assert_eq!(
            wrong(&LINE.replacen(",1,8,", ",inf,8,", 1)),
            "runs.csv: line 3, column `micro_batch`: \"inf\" is not a number of at least 0"
        );
        let with_cr =
            read(&format!("{header}\r\n{LINE}\r\n{}\r\n", LINE.replacen("32", "wide", 1)), "runs.csv");
        assert!(with_cr.unwrap_err().to_string().contains("line 3, column `hidden`"));
        assert!(
            wrong(&format!("\n\n{}", LINE.replacen("32", "wide", 1))).contains("line 5, column `hidden`")
        );
        assert!(wrong("1,2").contains("line 3 has 2 values for 11 columns: none for `heads` ("));
        assert!(
            wrong(&format!("{LINE},8"))
                .contains("line 3 has 12 values for 11 columns: extra values after `act_ckpt`")
        );
        let error = of(&header.replace("heads,", ""), LINE).unwrap_err();
        assert!(error.contains("missing column `heads`"), "{error}");
    }

    #[test]
    fn all_spellings_of_missing_value_are_accepted() {
        let header = format!("\u{feff}{},mfu,step_time_ms,row", NEEDED.join(","));
        for empty in EMPTY_VALUES.into_iter().chain([" N/A "]) {
            let row = of(&header, &format!("{LINE},guess,{empty},{empty}")).unwrap().remove(0);
            assert_eq!(
                (row.number("layers"), row.number("step_time_ms"), row.fitted()),
                (Some(2.0), None, None)
            );
            assert_eq!(row.id(), 2, "the line");
        }
        let row = |time: &str, id: &str| of(&header, &format!("{LINE},,{time},{id}")).unwrap().remove(0);
        assert_eq!(row("10", "a/7").id(), "a/7");
        assert_eq!(row("10", "7").id(), 7);
        assert_eq!((row("10", "").fitted(), row("OOM", "").fitted()), (Some(true), Some(false)));
    }

    #[test]
    fn measurement_must_be_positive_or_empty() {
        let header = format!("{},kv_heads,step_time_ms", NEEDED.join(","));
        for wrong in ["nan", "NaN", "0", "0.0", "-1", "inf", "10ms"] {
            let error = of(&header, &format!("{LINE},,{wrong}")).unwrap_err();
            let expected = format!(
                "runs.csv: line 2, column `step_time_ms`: \"{wrong}\" is not a number above 0; leave it empty where nothing was measured"
            );
            assert_eq!(error, expected);
        }
        let row = of(&header, &format!("{LINE},nan,")).unwrap().remove(0);
        assert_eq!((row.number("kv_heads"), row.number("step_time_ms")), (None, None));
    }

    #[test]
    fn file_without_runs_is_rejected() {
        let empty = read(&format!("{}\n", NEEDED.join(",")), "runs.csv").unwrap_err();
        assert_eq!(empty.to_string(), "runs.csv: there are no runs below the header");
    }

    #[test]
    fn result_columns_are_optional() {
        let row = of(&NEEDED.join(","), LINE).unwrap().remove(0);
        assert_eq!((row.text("precision"), row.text("act_ckpt"), row.number("params")), ("", "none", None));
    }
}
