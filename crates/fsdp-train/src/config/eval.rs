//! `data.eval`: the sets that a model is evaluated on, each for itself.
//!
//! Most runs have one, and then a list of paths says it: `eval = ["held-out"]`. Several are tables `[[data.eval]]`, because
//! each has a name, under which its loss is reported.

use super::error::ConfigError;
use super::kind::{COUNT, NAME, SOME_TEXTS};
use super::reader::Reader;
use super::table::table;
use super::written;

table! {
    /// A set of evaluation data.
    pub struct EvalSet {
        /// What metrics and reports call it.
        name: String = required(NAME),
        /// Its files and folders, read as those of `data.train` are.
        paths: Vec<String> = required(SOME_TEXTS),
        /// Evaluate on at most so many samples, the first ones; 0 means on all.
        max_samples: u64 = or(COUNT, 0),
    }
}

impl EvalSet {
    /// The set that a list of paths makes.
    pub fn of_paths(paths: Vec<String>) -> Self {
        Self { name: "eval".to_owned(), paths, max_samples: 0 }
    }
}
