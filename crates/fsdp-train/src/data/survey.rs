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
use super::tokens::SILENT;
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
    /// About how many tokens they have, where they hold text: as if all bytes became as many tokens as those of the first
    /// records. Of compressed files it is less than there are.
    pub about_tokens: u64,
    /// Whether the first records have tokens that do not count in the loss: conversations, and prompts with completions.
    pub has_prompts: bool,
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
    let files = found.len();
    match found[0].kind {
        Kind::Tokens(width) => {
            let tokens = bytes / width.bytes() as u64;
            Ok(Survey { files, bytes, tokens: Some(tokens), about_tokens: tokens, has_prompts: false })
        }
        Kind::Text | Kind::Jsonl | Kind::Parquet | Kind::Arrow => {
            let pair = [&config.prompt, &config.completion].map(Option::as_deref);
            let fields = Fields::new(config.column.as_deref()).with_pair(pair);
            let encoder = Encoder { tokenizer: &tokenizer, fields, chats: Chats::find(config, &tokenizer)? };
            let watch = &Watch::NOBODY;
            let first =
                pipeline::first(&Text { files: &found, encoder, malformed: config.malformed, watch })?;
            let (read, ids) = first.map_or((0, Vec::new()), |(read, encoded)| (read, encoded.ids));
            let about_tokens = u128::from(bytes) * ids.len() as u128 / read.max(1) as u128;
            let has_prompts = ids.iter().any(|id| id & SILENT != 0);
            let about_tokens = u64::try_from(about_tokens).unwrap_or(u64::MAX);
            Ok(Survey { files, bytes, tokens: None, about_tokens, has_prompts })
        }
    }
}
