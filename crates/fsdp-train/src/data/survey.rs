//! What can be said of data in a moment, without tokenizing all of it.

use std::path::Path;

use super::chat::Chats;
use super::dataset::{Dataset, Loading};
use super::encoder::Encoder;
use super::error::DataError;
use super::files::{self, DataFile, Kind};
use super::pipeline::{self, Beginning, Encoded};
use super::progress::Watch;
use super::record::Fields;
use super::role::Role;
use super::special::{Form, Special};
use super::text::Text;
use super::tokenizer::Tokenizer;
use super::tokens::SILENT;
use super::warning::DataWarning;
use crate::config::{DataConfig, Packing};

/// How much of text is looked at, in bytes of its records. As many become tokens in a second or two.
const LOOKED_AT_BYTES: usize = 1 << 21;

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
    /// Whether there is plain text among the first records.
    pub has_text: bool,
}

/// What is known of data before a run reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outlook {
    /// What was found.
    pub survey: Survey,
    /// What a run will read: known where there is little text, and of all tokens.
    pub whole: Option<Whole>,
    /// Ids of the tokenizer.
    pub tokenizer_ids: usize,
    /// What a run will warn of, as far as it can be known: where not all was looked at, of the first records.
    pub warnings: Vec<DataWarning>,
}

/// Data as a run reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whole {
    /// Its tokens.
    pub tokens: u64,
    /// Its samples.
    pub samples: u64,
}

/// Finds the files of a list of paths, and makes tokens of the first records.
///
/// # Errors
/// As [`Dataset::load`], as far as these records show it.
pub fn survey(paths: &[String], config: &DataConfig, out_dir: &Path) -> Result<Survey, DataError> {
    Ok(look(paths, config, out_dir)?.survey)
}

/// That paths lead to files of data: everything that keeps them from it.
pub fn lost(paths: &[String], config: &DataConfig, out_dir: &Path, role: &Role) -> Vec<DataError> {
    let Err(first) = files::find(paths, config, out_dir) else { return Vec::new() };
    let of_one = |path: &String| files::find(std::slice::from_ref(path), config, out_dir).err();
    let each: Vec<DataError> = paths.iter().filter_map(of_one).collect();
    let all = if each.is_empty() { vec![first] } else { each };
    all.into_iter().map(|error| error.of_key(role.key(config))).collect()
}

/// Looks at data for a model with this many token ids: at all of it, as a run will, where that takes no longer than a moment,
/// else at its first records.
///
/// # Errors
/// What a run would refuse: as [`Dataset::load`]; ids that the model does not have, and less data than its role asks for.
pub fn outlook(
    paths: &[String],
    config: &DataConfig,
    out_dir: &Path,
    role: &Role,
    vocab: usize,
) -> Result<Outlook, DataError> {
    let of_key = |error: DataError| error.of_key(role.key(config));
    let Look { survey, found, tokenizer, beginning } = look(paths, config, out_dir).map_err(of_key)?;
    let tokenizer_ids = tokenizer.vocab_size();
    if let Some(beginning) = beginning.filter(|beginning| !beginning.is_all) {
        let special = Special::resolve(config, &tokenizer)?;
        check_vocabulary(&beginning, &found, special, vocab)?;
        let warnings = expected(&beginning, special, config, tokenizer.digest().is_some());
        return Ok(Outlook { survey, whole: None, tokenizer_ids, warnings });
    }
    let mut dataset = Dataset::load(paths, config, &Loading::to_look(out_dir)).map_err(of_key)?;
    dataset.check_vocabulary(vocab)?;
    role.expect(dataset.len(), dataset.seq_len())?;
    let whole = Whole { tokens: dataset.tokens_len() as u64, samples: dataset.len() as u64 };
    dataset.warn_of_clipped(role.samples_max());
    Ok(Outlook { survey, whole: Some(whole), tokenizer_ids, warnings: dataset.warnings().to_vec() })
}

/// What the first records show of what a run will warn of.
fn expected(
    beginning: &Beginning,
    special: Special,
    config: &DataConfig,
    has_vocabulary: bool,
) -> Vec<DataWarning> {
    let documents = || beginning.encoded.iter().flat_map(Encoded::documents).filter(|(len, _)| *len > 0);
    let count = |form: Form| documents().filter(|(_, of)| *of == form).count();
    let mut warnings = special.warnings(config, has_vocabulary, count);
    if config.packing != Packing::Stream {
        let excess = |(len, form): (usize, Form)| {
            (len + special.around(form).count()).saturating_sub(config.seq_len + 1)
        };
        warnings.extend(DataWarning::clipped(documents().map(excess)));
    }
    warnings
}

/// A survey, with what it was made of.
struct Look {
    survey: Survey,
    found: Vec<DataFile>,
    tokenizer: Tokenizer,
    /// The first records of text.
    beginning: Option<Beginning>,
}

fn look(paths: &[String], config: &DataConfig, out_dir: &Path) -> Result<Look, DataError> {
    let found = files::find(paths, config, out_dir)?;
    let mut bytes = 0;
    for file in &found {
        let length = file.path.metadata().map_err(|source| files::unreadable(&file.path, source))?.len();
        bytes += length;
    }
    let tokenizer = Tokenizer::load(&config.tokenizer)?;
    let files = found.len();
    if let Kind::Tokens(width) = found[0].kind {
        let tokens = bytes / width.bytes() as u64;
        let survey = Survey {
            files,
            bytes,
            tokens: Some(tokens),
            about_tokens: tokens,
            has_prompts: false,
            has_text: false,
        };
        return Ok(Look { survey, found, tokenizer, beginning: None });
    }
    let beginning = beginning(&found, config, &tokenizer)?;
    let count: usize = beginning.encoded.iter().map(|batch| batch.ids.len()).sum();
    let about_tokens = u128::from(bytes) * count as u128 / beginning.bytes.max(1) as u128;
    let about_tokens = u64::try_from(about_tokens).unwrap_or(u64::MAX);
    let has_prompts = beginning.encoded.iter().any(|batch| batch.ids.iter().any(|id| id & SILENT != 0));
    let has_text = beginning.encoded.iter().flat_map(Encoded::documents).any(|(_, form)| form == Form::Text);
    let survey = Survey { files, bytes, tokens: None, about_tokens, has_prompts, has_text };
    Ok(Look { survey, found, tokenizer, beginning: Some(beginning) })
}

fn beginning(found: &[DataFile], config: &DataConfig, tokenizer: &Tokenizer) -> Result<Beginning, DataError> {
    let pair = [&config.prompt, &config.completion].map(Option::as_deref);
    let fields = Fields::new(config.column.as_deref()).with_pair(pair);
    let encoder = Encoder { tokenizer, fields, chats: Chats::find(config, tokenizer)? };
    let text = Text { files: found, encoder, malformed: config.malformed, watch: &Watch::NOBODY };
    pipeline::beginning(&text, LOOKED_AT_BYTES)
}

/// That a model has the ids of the first records, and those that are put around documents.
fn check_vocabulary(
    beginning: &Beginning,
    found: &[DataFile],
    special: Special,
    vocab: usize,
) -> Result<(), DataError> {
    let forms = beginning.encoded.iter().flat_map(Encoded::documents).map(|(_, form)| form);
    special.check_vocabulary(forms, vocab)?;
    for Encoded { file, ids, .. } in &beginning.encoded {
        if let Some(id) = ids.iter().map(|id| id & !SILENT).find(|&id| id as usize >= vocab) {
            let reason = format!(
                "token id {id} (among the first records), but the model's vocab_size is {vocab}; use the model's own tokenizer"
            );
            return Err(DataError::Malformed { file: found[*file].path.clone(), reason });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
