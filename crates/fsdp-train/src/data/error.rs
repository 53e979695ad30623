//! What can be wrong with data.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

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
    /// A file does not hold what it should.
    #[error("{}: {reason}", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// Where and what, and the way out.
        reason: String,
    },
    /// A file is not what it was when it was first read.
    #[error("{} has changed while it was read; start again when nobody writes to it", file.display())]
    Changed {
        /// The file.
        file: PathBuf,
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
    /// There is no chat template, or it is none.
    #[error("{origin}: {reason}")]
    ChatTemplate {
        /// Where it was looked for.
        origin: String,
        /// What is wrong, with line and column, and the way out.
        reason: String,
    },
    /// `bos`, `eos` or `pad` is not a token of the tokenizer or of the model.
    #[error("`{key}` {reason}")]
    SpecialToken {
        /// The key, dotted.
        key: &'static str,
        /// Which token it is, and what there is instead.
        reason: String,
    },
    /// Data has documents, and no token of them is to be learned.
    #[error(
        "none of {documents} documents in {} has a token that counts (data.loss_on = \"answers\"){}, or count all tokens with \
         data.loss_on = \"all\"",
        paths.join(", "), why_nothing_counts(*seq_len, *needed)
    )]
    NothingCounts {
        /// Where they are.
        paths: Vec<String>,
        /// The documents.
        documents: usize,
        /// Inputs per sample.
        seq_len: usize,
        /// Inputs per sample with which a token would count, if one would.
        needed: Option<usize>,
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
    /// A source gives nothing to a mix.
    #[error(
        "data.source[{index}] holds no sample of {seq_len} tokens; add data, lower data.seq_len, or remove the source"
    )]
    EmptySource {
        /// Which one, from 0.
        index: usize,
        /// Inputs per sample.
        seq_len: usize,
    },
    /// A source has too small a part of a mix.
    #[error(
        "data.source[{index}] has less than one of {slots} samples by its weight; raise the weight, or remove the source"
    )]
    Share {
        /// Which one, from 0.
        index: usize,
        /// The samples of which the smallest share is one.
        slots: usize,
    },
    /// There is nothing to evaluate on.
    #[error("data.eval \"{set}\" holds no sample of {seq_len} tokens; add data, or lower data.seq_len")]
    NoSamples {
        /// The set.
        set: String,
        /// Inputs per sample.
        seq_len: usize,
    },
}

/// What documents lack, and how they get it.
fn why_nothing_counts(seq_len: usize, needed: Option<usize>) -> String {
    match needed {
        Some(needed) => format!(" within data.seq_len = {seq_len}: raise that to at least {needed}"),
        None => ": there is no message of the assistant and no completion in them, or the chat template marks none as \
                 generated; give data with answers"
            .to_owned(),
    }
}

impl DataError {
    /// Names the key whose paths lead to a file or folder that can not be used.
    pub(crate) fn of_key(mut self, named: &'static str) -> DataError {
        if let DataError::Read { key, .. } | DataError::InOutput { key, .. } = &mut self {
            *key = named;
        }
        self
    }
}
