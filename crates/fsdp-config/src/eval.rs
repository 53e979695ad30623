//! `data.eval`: the sets a model is evaluated on, each separately.
//!
//! Most runs have one set and write it as a list of paths: `eval = ["held-out"]`. Several sets are `[[data.eval]]`
//! tables, because each needs a name under which its loss is reported.

use std::collections::BTreeSet;

use super::error::ConfigError;
use super::kind::{COUNT, NAME, SOME_TEXTS, TEXTS};
use super::reader::Reader;
use super::table::table;
use super::writer::{self, Short};

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

impl Short for EvalSet {
    fn short(&self) -> Option<&[String]> {
        (*self == Self::of_paths(self.paths.clone())).then_some(&*self.paths)
    }
}

impl Reader<'_> {
    /// Returns sets of evaluation data: tables, or a list of paths for a single set.
    ///
    /// # Errors
    /// As [`Reader::tables`]; [`ConfigError::Value`] if two sets have the same name.
    pub(super) fn eval_sets(&self, key: &'static str) -> Result<Vec<EvalSet>, ConfigError> {
        const ALLOWED: &str =
            "a list of paths, none of them empty, or tables [[data.eval]] with name and paths";
        if let Ok(paths) = self.optional(key, TEXTS) {
            let paths = paths.filter(|paths| !paths.is_empty());
            return Ok(paths.map(EvalSet::of_paths).into_iter().collect());
        }
        let sets = self.tables(key, ALLOWED, EvalSet::read)?;
        let mut names = BTreeSet::new();
        if sets.iter().all(|set| names.insert(&set.name)) {
            return Ok(sets);
        }
        Err(self.rejected(key, "a list of sets with different names"))
    }
}
