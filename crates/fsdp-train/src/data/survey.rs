//! What can be said of data in a moment, without tokenizing it.

use std::path::Path;

use super::chat::Chats;
use super::encoder::Encoder;
use super::error::DataError;
use super::files::{self, Kind};
use super::pipeline;
use super::progress::Watch;
use super::record::Fields;
use super::text::Text;
use super::tokenizer::Tokenizer;
use crate::config::DataConfig;

/// Files that were found, whose first records could be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Survey {
    /// Files.
    pub files: usize,
    /// Their bytes, as they lie on the disk.
    pub bytes: u64,
    /// Their tokens, where they hold tokens.
    pub tokens: Option<u64>,
}

/// Finds the files of a list of paths, and makes tokens of the first records of the first one.
///
/// # Errors
/// As [`Dataset::load`](super::Dataset::load), as far as these records show it.
pub fn survey(paths: &[String], config: &DataConfig, out_dir: &Path) -> Result<Survey, DataError> {
    let found = files::find(paths, config, out_dir)?;
    let mut bytes = 0;
    for file in &found {
        let length = file.path.metadata().map_err(|source| files::unreadable(&file.path, source))?.len();
        bytes += length;
    }
    let tokenizer = Tokenizer::load(&config.tokenizer)?;
    let tokens = match found[0].kind {
        Kind::Tokens(width) => Some(bytes / width.bytes() as u64),
        Kind::Text | Kind::Jsonl | Kind::Parquet => {
            let pair = [&config.prompt, &config.completion].map(Option::as_deref);
            let fields = Fields::new(config.column.as_deref()).with_pair(pair);
            let encoder = Encoder { tokenizer: &tokenizer, fields, chats: Chats::find(config, &tokenizer)? };
            let watch = &Watch::NOBODY;
            pipeline::first(&Text { files: &found, encoder, malformed: config.malformed, watch })?;
            None
        }
    };
    Ok(Survey { files: found.len(), bytes, tokens })
}
