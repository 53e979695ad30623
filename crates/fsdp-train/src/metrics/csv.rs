//! Metrics as CSV tables, for spreadsheets and data frames: a row per step, and a row per evaluation of a set.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::sink::{Figure, Sink};
use crate::atomic_file;

/// Name of the table of steps, in the output folder.
pub(crate) const STEPS: &str = "metrics.csv";

/// Name of the table of evaluations, in the output folder.
pub(crate) const EVALUATIONS: &str = "evaluations.csv";

/// The columns of [`STEPS`]: all figures that a step can have. The cell of a missing figure is empty.
const STEP_COLUMNS: [&str; 23] = [
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "targets",
    "tokens_per_s",
    "step_ms",
    "loss_scale",
    "mfu",
    "mfu_6n",
    "wait_step",
    "wait_ms",
    "wait_ms_max",
    "wait_ms_min",
    "slowest_rank",
    "cross_entropy",
    "z_loss",
    "router_loss",
    "router_z_loss",
    "router_sequence_loss",
    "expert_imbalance",
    "idle_experts",
];

/// The columns of [`EVALUATIONS`].
const EVALUATION_COLUMNS: [&str; 5] = ["step", "set", "eval_loss", "eval_perplexity", "eval_tokens"];

/// Both tables.
pub(super) struct Tables {
    path: PathBuf,
    steps: File,
    evaluations: File,
}

impl Tables {
    /// Continues the tables of an output folder after the rows of the first `step` steps, or creates them.
    ///
    /// # Errors
    /// If a file cannot be read or replaced.
    pub(super) fn resume(out_dir: &Path, step: u64) -> io::Result<Self> {
        let steps = open(&out_dir.join(STEPS), &STEP_COLUMNS, step)?;
        let evaluations = open(&out_dir.join(EVALUATIONS), &EVALUATION_COLUMNS, step)?;
        Ok(Self { path: out_dir.join(STEPS), steps, evaluations })
    }
}

impl Sink for Tables {
    fn path(&self) -> &Path {
        &self.path
    }

    fn step(&mut self, step: u64, figures: &[Figure]) -> io::Result<()> {
        let cells = [step.to_string()].into_iter().chain(cells(&STEP_COLUMNS[1..], figures));
        self.steps.write_all(row(cells).as_bytes())
    }

    fn evaluation(&mut self, step: u64, set: &str, figures: &[Figure]) -> io::Result<()> {
        // The name of a set needs no quotes.
        let leading = [step.to_string(), set.to_owned()];
        let cells = leading.into_iter().chain(cells(&EVALUATION_COLUMNS[2..], figures));
        self.evaluations.write_all(row(cells).as_bytes())
    }
}

fn cells(columns: &[&str], figures: &[Figure]) -> impl Iterator<Item = String> {
    columns.iter().map(|column| {
        let figure = figures.iter().find(|figure| figure.name == *column);
        figure.map_or(String::new(), |figure| figure.value.to_string())
    })
}

fn row(cells: impl Iterator<Item = String>) -> String {
    cells.collect::<Vec<_>>().join(",") + "\n"
}

/// Removes rows of steps after `step` from the tables, if they exist.
///
/// # Errors
/// If a file cannot be read or replaced.
pub(super) fn cut(out_dir: &Path, step: u64) -> io::Result<()> {
    for (name, columns) in [(STEPS, &STEP_COLUMNS[..]), (EVALUATIONS, &EVALUATION_COLUMNS)] {
        let path = out_dir.join(name);
        match (path.exists(), step) {
            (false, _) => {}
            (true, 0) => fs::remove_file(path)?,
            (true, _) => drop(open(&path, columns, step)?),
        }
    }
    Ok(())
}

/// Opens a table for appending after the last complete row of the first `step` steps. A table with other columns, from
/// another version, is replaced by an empty one.
fn open(path: &Path, columns: &[&str], step: u64) -> io::Result<File> {
    let header = row(columns.iter().map(|&column| column.to_owned()));
    let before = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        before => before?,
    };
    let rows = before.strip_prefix(header.as_bytes()).unwrap_or_default();
    let is_kept = |row: &&[u8]| {
        let number = row.split(|&byte| byte == b',').next().and_then(|cell| str::from_utf8(cell).ok());
        row.ends_with(b"\n")
            && number.and_then(|cell| cell.parse().ok()).is_some_and(|done: u64| done <= step)
    };
    let kept: usize = rows.split_inclusive(|&byte| byte == b'\n').take_while(is_kept).map(<[u8]>::len).sum();
    atomic_file::replace(path, &[header.as_bytes(), &rows[..kept]].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::sink::figures;
    use crate::metrics::tests::{full, metrics};

    #[test]
    fn every_step_figure_has_column() {
        let names: Vec<String> = figures(&full(1)).into_iter().map(|figure| figure.name).collect();
        assert_eq!(names, STEP_COLUMNS[1..]);
    }

    #[test]
    fn row_has_cell_per_column_and_missing_figures_are_empty() {
        let dir = tempfile::tempdir().unwrap();
        let mut tables = Tables::resume(dir.path(), 0).unwrap();
        tables.step(1, &figures(&metrics(1, None))).unwrap();
        let nan = [Figure { name: "eval_loss".to_owned(), value: f64::NAN }];
        tables.evaluation(1, "books", &nan).unwrap();
        let steps = fs::read_to_string(dir.path().join(STEPS)).unwrap();
        assert_eq!(steps.lines().nth(1), Some("1,5.5,1.25,0.0003,2048,2000,1000.5,2047,,,,,,,,,,,,,,,"));
        let evaluations = fs::read_to_string(dir.path().join(EVALUATIONS)).unwrap();
        assert_eq!(evaluations, "step,set,eval_loss,eval_perplexity,eval_tokens\n1,books,NaN,,\n");
    }

    #[test]
    fn resume_cuts_later_and_incomplete_rows() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(STEPS);
        let write = |from: u64, steps: std::ops::RangeInclusive<u64>| {
            let mut tables = Tables::resume(dir.path(), from).unwrap();
            steps.for_each(|step| tables.step(step, &figures(&metrics(step, None))).unwrap());
            fs::read_to_string(&path).unwrap()
        };
        let whole = write(0, 1..=5);
        assert_eq!(write(2, 3..=5), whole);
        fs::write(&path, format!("{whole}6,1.0")).unwrap();
        assert_eq!(write(9, 6..=6).lines().count(), 7);
        fs::write(&path, "other,columns\n1,2\n").unwrap();
        assert_eq!(write(3, 4..=5).lines().count(), 3);
        cut(dir.path(), 4).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2);
        cut(dir.path(), 0).unwrap();
        assert!(!path.exists());
    }
}
