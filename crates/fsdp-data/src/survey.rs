//! Quick statistics of data, without tokenizing all of it.

use std::path::Path;

use fsdp_config::{DataConfig, Packing};

use super::chat::Chats;
use super::dataset::Dataset;
use super::encoder::Encoder;
use super::error::DataError;
use super::files::{self, DataFile, Kind};
use super::loading::Loading;
use super::pipeline::{self, Beginning, Encoded, Text};
use super::progress::Watch;
use super::record::Fields;
use super::role::Role;
use super::special::{Form, Special};
use super::tokenizer::Tokenizer;
use super::tokens::IGNORED_BIT;
use super::warning::DataWarning;

/// Size of the text records that are examined, in bytes. These are tokenized in a second or two.
const SURVEY_BYTES: usize = 1 << 21;

/// Size of the records of compressed files and of Arrow that are read, in bytes, to find files that expand without end: twice what a
/// small one may expand to. These are read in a second or two.
const READ_BYTES: usize = 1 << 29;

/// Statistics of the files that were found, whose first records could be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Survey {
    /// Number of files.
    pub files: usize,
    /// Size of the files on disk, in bytes.
    pub bytes: u64,
    /// Number of tokens in token files; `None` for text.
    pub tokens: Option<u64>,
    /// Size of the text records that were examined, in bytes.
    pub examined: u64,
    /// Estimated number of tokens: for text, all bytes are assumed to have as many tokens as those of the first
    /// records. For compressed files the estimate is too low.
    pub about_tokens: u64,
    /// Whether the first records have tokens that do not count in the loss: conversations, and prompts with
    /// completions.
    pub has_prompts: bool,
    /// Whether the first records include plain text.
    pub has_text: bool,
}

/// What is known about data before a run reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outlook {
    /// Statistics of the files.
    pub survey: Survey,
    /// Size of the data as a run will read it; `None` if there is too much text to examine all of it.
    pub whole: Option<Whole>,
    /// Number of ids of the tokenizer.
    pub tokenizer_ids: usize,
    /// Warnings that a run will give, as far as known: if not all data was examined, those of the first records.
    pub warnings: Vec<DataWarning>,
}

/// Size of the data as a run reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whole {
    /// Number of tokens.
    pub tokens: u64,
    /// Number of samples.
    pub samples: u64,
}

/// Finds the files of a list of paths, and tokenizes their first records.
///
/// # Errors
/// Those of [`RunData::load`](crate::RunData::load), as far as the first records reveal them.
pub fn survey(paths: &[String], config: &DataConfig, out_dir: &Path) -> Result<Survey, DataError> {
    Ok(survey_files(paths, config, out_dir)?.survey)
}

/// Returns the errors that keep paths from leading to data files.
pub fn lost(paths: &[String], config: &DataConfig, out_dir: &Path, role: &Role) -> Vec<DataError> {
    let Err(first) = files::find(paths, config, out_dir) else { return Vec::new() };
    let error_of = |path: &String| files::find(std::slice::from_ref(path), config, out_dir).err();
    let each: Vec<DataError> = paths.iter().filter_map(error_of).collect();
    let all = if each.is_empty() { vec![first] } else { each };
    all.into_iter().map(|error| error.of_key(role.key(config))).collect()
}

/// Examines data for a model with `vocab` token ids: all of it, as a run would, if that is quick, else its first
/// records.
///
/// # Errors
/// Those of [`RunData::load`](crate::RunData::load).
pub fn outlook(
    paths: &[String],
    config: &DataConfig,
    out_dir: &Path,
    role: &Role,
    vocab: usize,
) -> Result<Outlook, DataError> {
    let of_key = |error: DataError| error.of_key(role.key(config));
    let SurveyedData { survey, found, tokenizer, beginning } =
        survey_files(paths, config, out_dir).map_err(of_key)?;
    let tokenizer_ids = tokenizer.vocab_size();
    if let Some(beginning) = beginning.filter(|beginning| !beginning.is_all) {
        pipeline::check_expansion(&text(&found, config, &tokenizer)?, READ_BYTES)?;
        let special = Special::resolve(config, &tokenizer)?;
        check_vocabulary(&beginning, &found, special, vocab)?;
        let warnings = expected_warnings(&beginning, special, config, tokenizer.digest().is_some());
        return Ok(Outlook { survey, whole: None, tokenizer_ids, warnings });
    }
    let mut dataset = Dataset::load(paths, config, &Loading::read_only(out_dir)).map_err(of_key)?;
    dataset.check_vocabulary(vocab)?;
    role.expect(dataset.len(), dataset.seq_len())?;
    let whole = Whole { tokens: dataset.tokens_len() as u64, samples: dataset.len() as u64 };
    dataset.warn_of_clipped(role.samples_max());
    Ok(Outlook { survey, whole: Some(whole), tokenizer_ids, warnings: dataset.warnings().to_vec() })
}

/// Returns the warnings that the first records imply for a run.
fn expected_warnings(
    beginning: &Beginning,
    special: Special,
    config: &DataConfig,
    has_vocabulary: bool,
) -> Vec<DataWarning> {
    let documents = || beginning.encoded.iter().flat_map(Encoded::documents).filter(|(len, _)| *len > 0);
    let count = |form: Form| documents().filter(|(_, other)| *other == form).count();
    let mut warnings = special.warnings(config, has_vocabulary, count);
    if config.packing != Packing::Stream {
        let excess = |(len, form): (usize, Form)| {
            (len + special.added_ids(form).count()).saturating_sub(config.seq_len + 1)
        };
        warnings.extend(DataWarning::clipped(documents().map(excess)));
    }
    warnings
}

/// A survey, with the data that it is based on.
struct SurveyedData {
    survey: Survey,
    found: Vec<DataFile>,
    tokenizer: Tokenizer,
    /// The first records of text; `None` for token files.
    beginning: Option<Beginning>,
}

fn survey_files(paths: &[String], config: &DataConfig, out_dir: &Path) -> Result<SurveyedData, DataError> {
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
            examined: 0,
            about_tokens: tokens,
            has_prompts: false,
            has_text: false,
        };
        return Ok(SurveyedData { survey, found, tokenizer, beginning: None });
    }
    let beginning = pipeline::beginning(&text(&found, config, &tokenizer)?, SURVEY_BYTES)?;
    let count: usize = beginning.encoded.iter().map(|batch| batch.ids.len()).sum();
    let about_tokens = u128::from(bytes) * count as u128 / beginning.bytes.max(1) as u128;
    let about_tokens = u64::try_from(about_tokens).unwrap_or(u64::MAX);
    let has_prompts = beginning.encoded.iter().any(|batch| batch.ids.iter().any(|id| id & IGNORED_BIT != 0));
    let has_text = beginning.encoded.iter().flat_map(Encoded::documents).any(|(_, form)| form == Form::Text);
    let examined = beginning.bytes as u64;
    let survey = Survey { files, bytes, tokens: None, examined, about_tokens, has_prompts, has_text };
    Ok(SurveyedData { survey, found, tokenizer, beginning: Some(beginning) })
}

fn text<'a>(
    found: &'a [DataFile],
    config: &DataConfig,
    tokenizer: &'a Tokenizer,
) -> Result<Text<'a>, DataError> {
    let pair = [&config.prompt, &config.completion].map(Option::as_deref);
    let fields = Fields::new(config.column.as_deref()).with_pair(pair);
    Ok(Text {
        files: found,
        encoder: Encoder { tokenizer, fields, chats: Chats::find(config, tokenizer)? },
        malformed: config.malformed,
        expansion_max: config.expansion_max,
        watch: &Watch::NONE,
    })
}

/// Checks that the model has the ids of the first records, and those added around documents.
fn check_vocabulary(
    beginning: &Beginning,
    found: &[DataFile],
    special: Special,
    vocab: usize,
) -> Result<(), DataError> {
    let forms = beginning.encoded.iter().flat_map(Encoded::documents).map(|(_, form)| form);
    special.check_vocabulary(forms, vocab)?;
    for Encoded { file, ids, .. } in &beginning.encoded {
        if let Some(id) = ids.iter().map(|id| id & !IGNORED_BIT).find(|&id| id as usize >= vocab) {
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
