//! `data.eval`: the sets a model is evaluated on, each separately.
//!
//! Most runs have one set and write it as a list of paths: `eval = ["held-out"]`. Several sets are `[[data.eval]]`
//! tables, because each needs a name under which its loss is reported.

use super::error::ConfigError;
use super::kind::{COUNT, NAME, SOME_TEXTS};
use super::reader::Reader;
use super::table::table;
use super::writer;

table! {
    /// A set of evaluation data.
    pub struct EvalSet {
        /// Its name in metrics and reports.
        name: String = required(NAME),
        /// Its files and folders, read like those of `data.train`.
        paths: Vec<String> = required(SOME_TEXTS),
        /// Maximum number of samples to evaluate on, from the start; 0 means all.
        max_samples: u64 = or(COUNT, 0),
    }
}

impl EvalSet {
    /// Returns the set for a plain list of paths. Its name is `eval`.
    pub fn of_paths(paths: Vec<String>) -> Self {
        Self { name: "eval".to_owned(), paths, max_samples: 0 }
    }
}
