//! How data is read, besides the configuration.

use std::path::Path;

use super::progress::Watch;

/// Options for reading data that are not part of the configuration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Loading<'a> {
    /// The output folder of the run; files in it are not data.
    pub(super) out_dir: &'a Path,
    /// Receives the progress.
    pub(super) watch: &'a Watch<'a>,
    /// Whether the tokens of text are cached in `data.cache`, if it is outside of the output folder. (If it is inside,
    /// see [`Dataset::keep`](super::dataset::Dataset::keep).)
    pub(super) keeps: bool,
}

impl<'a> Loading<'a> {
    /// Options for a run with this output folder, without progress reports.
    pub(super) fn quietly(out_dir: &'a Path) -> Loading<'a> {
        Loading { out_dir, watch: &Watch::NONE, keeps: true }
    }

    /// As [`quietly`](Loading::quietly), but nothing is written.
    pub(super) fn read_only(out_dir: &'a Path) -> Loading<'a> {
        Loading { keeps: false, ..Loading::quietly(out_dir) }
    }
}
