//! What can be wrong with data.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::config::DataConfig;

/// Data that cannot be trained on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file or folder cannot be read.
    #[error("cannot read {}: {source}; check the paths of {key}", file.display())]
    Read {
        /// The key that leads there, dotted.
        key: &'static str,
        /// The file or folder.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file or folder of the data is in a folder that the run writes to.
    #[error(
        "{key}: {} lies in {written} {}, which the run writes to; move the data, or choose another {written}",
        path.display(), folder.display()
    )]
    InOutput {
        /// The key that leads there, dotted.
        key: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The key of the folder, dotted.
        written: &'static str,
        /// The folder.
        folder: PathBuf,
    },
    /// None of the paths holds a file of the format.
    #[error("no {wanted} in {}; check the paths of [data] and data.format", paths.join(", "))]
    NoFiles {
        /// What was looked for.
        wanted: &'static str,
        /// Where.
        paths: Vec<String>,
    },
    /// A file that was named is not UTF-8.
    #[error(
        "{} is not UTF-8 text (byte {offset_bytes}); convert it, or choose another data.format",
        file.display()
    )]
    NotUtf8 {
        /// The file.
        file: PathBuf,
        /// The length of the valid part.
        offset_bytes: usize,
    },
    /// A line is not a JSON object with a string under `text`.
    #[error(
        "{} line {line}: {source}; every line must be an object with a string under \"text\"",
        file.display()
    )]
    Jsonl {
        /// The file.
        file: PathBuf,
        /// The line, from 1.
        line: usize,
        /// Why.
        source: serde_json::Error,
    },
    /// A file of token ids does not hold whole ids.
    #[error(
        "{} has {len_bytes} bytes, not a multiple of {width_bytes}; is it truncated, or data.format wrong?",
        file.display()
    )]
    TornTokens {
        /// The file.
        file: PathBuf,
        /// Its length.
        len_bytes: usize,
        /// The width of an id.
        width_bytes: usize,
    },
    /// A tokenizer cannot be read.
    #[error(
        "cannot load tokenizer {}: {source}; data.tokenizer must be \"bytes\" or a tokenizer.json",
        file.display()
    )]
    Tokenizer {
        /// The file.
        file: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A text cannot be tokenized.
    #[error("{}: cannot tokenize: {source}", file.display())]
    Encode {
        /// The file of the text.
        file: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// `bos`, `eos` or `pad` is not a token.
    #[error(
        "`{key}` is \"{token}\", which tokenizer \"{tokenizer}\" does not have; give a token of it, or an id"
    )]
    UnknownToken {
        /// The key, dotted.
        key: &'static str,
        /// The token.
        token: String,
        /// The tokenizer, as configured.
        tokenizer: String,
    },
    /// `bos`, `eos` or `pad` is beyond the vocabulary.
    #[error("`{key}` has id {id}, but the model's vocab_size is {vocab_size}; choose another token or model")]
    SpecialOutOfVocabulary {
        /// The key, dotted.
        key: &'static str,
        /// The id.
        id: u32,
        /// The vocabulary of the model.
        vocab_size: usize,
    },
    /// A token is beyond the vocabulary.
    #[error(
        "{}: token id {id} (sample {sample}, position {position}), but the model's vocab_size is \
         {vocab_size}; use the model's own tokenizer",
        file.display()
    )]
    OutOfVocabulary {
        /// The file of the token.
        file: PathBuf,
        /// The sample.
        sample: usize,
        /// The position in the sample's `seq_len + 1` tokens.
        position: usize,
        /// The id.
        id: u32,
        /// The vocabulary of the model.
        vocab_size: usize,
    },
    /// The data does not fill one global batch.
    #[error(
        "the data holds {samples} samples of {seq_len} tokens, fewer than one global batch of \
         {global_batch}; add data, or lower data.seq_len or train.global_batch_size"
    )]
    TooShort {
        /// The samples.
        samples: usize,
        /// Inputs per sample.
        seq_len: usize,
        /// Samples of a global batch.
        global_batch: usize,
    },
    /// There is nothing to evaluate on.
    #[error("data.eval holds no sample of {seq_len} tokens; add data, or lower data.seq_len")]
    NoSamples {
        /// Inputs per sample.
        seq_len: usize,
    },
}

impl DataError {
    /// Names the key whose paths lead to a file or folder that can not be used.
    pub(crate) fn with_key(mut self, config: &DataConfig) -> DataError {
        if let DataError::Read { key, file, .. } | DataError::InOutput { key, path: file, .. } = &mut self {
            let leads = |paths: &[String]| paths.iter().any(|path| file.starts_with(path));
            *key = if leads(&config.train) || !leads(&config.eval) { "data.train" } else { "data.eval" };
        }
        self
    }
}
