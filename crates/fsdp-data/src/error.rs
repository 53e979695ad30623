//! Errors in training and evaluation data.

use std::io;
use std::path::PathBuf;

use fsdp_core::FailureKind;
use thiserror::Error;

/// Data that cannot be trained on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file or folder cannot be read.
    #[error("cannot read {}: {source}; check the paths of {key}", file.display())]
    Read {
        /// The dotted key whose paths lead there.
        key: &'static str,
        /// The file or folder.
        file: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// Data in an object store cannot be read.
    #[error(transparent)]
    Store(#[from] fsdp_ckpt::Error),
    /// Data in an object store cannot be copied to this machine.
    #[error("cannot {action} {}: {source}; set FSDP_CACHE_DIR to another folder for copies of data", path.display())]
    Copy {
        /// The failed operation, as a verb.
        action: &'static str,
        /// The path it failed on.
        path: PathBuf,
        /// The underlying error.
        source: io::Error,
    },
    /// A file or folder of the data is in a folder that the run writes to.
    #[error(
        "{key}: {} lies in {written} {}, which the run writes to; move the data, or choose another {written}",
        path.display(), folder.display()
    )]
    InOutput {
        /// The dotted key whose paths lead there.
        key: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The dotted key of the folder.
        written: &'static str,
        /// The folder.
        folder: PathBuf,
    },
    /// None of the paths has a file of the format.
    #[error("no {wanted} in {}; check the paths of [data] and data.format", paths.join(", "))]
    NoFiles {
        /// Description of the files that were searched for.
        wanted: &'static str,
        /// The paths that were searched.
        paths: Vec<String>,
    },
    /// A file does not have the expected contents.
    #[error("{}: {reason}", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// Where and what the fault is, and how to fix it.
        reason: String,
    },
    /// A file expands to far more than its size.
    #[error(
        "{}: {position}: it has expanded to {made_bytes} bytes so far, but the maximum for a file of {file_bytes} bytes is \
         {limit_bytes}; if its content is meant to be that repetitive, raise data.expansion_max (now {times} times the size \
         of the file)",
        file.display()
    )]
    Expansion {
        /// The file.
        file: PathBuf,
        /// Where in the file the maximum is exceeded.
        position: String,
        /// Size of the file.
        file_bytes: u64,
        /// Size of what was read of it so far.
        made_bytes: u64,
        /// The maximum.
        limit_bytes: u64,
        /// The value of `data.expansion_max`.
        times: u64,
    },
    /// A file changed after it was first read.
    #[error("{} changed while it was being read; start again when nothing writes to it", file.display())]
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
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// There is no chat template, or it is not valid.
    #[error("{origin}: {reason}")]
    ChatTemplate {
        /// Where it was looked for.
        origin: String,
        /// What is wrong, with line and column, and how to fix it.
        reason: String,
    },
    /// The program has not called [`contain_chat_templates`](super::contain_chat_templates).
    #[error(
        "chat templates come with downloaded models and are programs, which this program does not contain; call \
         `fsdp::run::contain_chat_templates` first in its `main`"
    )]
    ChatUncontained,
    /// A process in which chat templates run cannot be started, or was ended from outside.
    #[error(
        "cannot run the chat template in a process of its own, one for each thread that tokenizes (RAYON_NUM_THREADS sets \
         their number): {source}"
    )]
    ChatProcess {
        /// The error of the operating system, or how the process ended.
        source: io::Error,
    },
    /// `bos`, `eos` or `pad` is not a token of the tokenizer or of the model.
    #[error("`{key}` {reason}")]
    SpecialToken {
        /// The key, dotted.
        key: &'static str,
        /// Which token it is, and which tokens exist instead.
        reason: String,
    },
    /// There are documents, but none of their tokens count in the loss.
    #[error(
        "none of {documents} documents in {} has a token that counts (data.loss_on){}, or count all tokens with \
         data.loss_on = \"all\"",
        paths.join(", "), why_nothing_counts(*seq_len, *needed)
    )]
    NothingCounts {
        /// The paths of the documents.
        paths: Vec<String>,
        /// Number of documents.
        documents: usize,
        /// Inputs per sample.
        seq_len: usize,
        /// The least number of inputs per sample with which a token would count; `None` if there is no such number.
        needed: Option<usize>,
    },
    /// The data does not fill one global batch.
    #[error(
        "the data holds {samples} samples of {seq_len} tokens, fewer than one global batch of \
         {global_batch}; add data, or lower data.seq_len or train.global_batch_size"
    )]
    TooShort {
        /// Number of samples.
        samples: usize,
        /// Inputs per sample.
        seq_len: usize,
        /// Samples per global batch.
        global_batch: usize,
    },
    /// A source contributes no samples to a mix.
    #[error(
        "data.source[{index}] holds no sample of {seq_len} tokens; add data, lower data.seq_len, or remove the source"
    )]
    EmptySource {
        /// Index of the source, from 0.
        index: usize,
        /// Inputs per sample.
        seq_len: usize,
    },
    /// The share of a source in a mix is too small.
    #[error(
        "data.source[{index}] gets less than one of {slots} samples by its weight; raise the weight, or \
         remove the source"
    )]
    Share {
        /// Index of the source, from 0.
        index: usize,
        /// Number of samples in a cycle, of which a source needs at least one.
        slots: usize,
    },
    /// There is no evaluation data.
    #[error(
        "data.eval: the run file has no evaluation sets; name one with data.eval = [\"held-out.txt\"], or with a table \
         [[data.eval]] that has `name` and `paths` for each"
    )]
    NothingToEvaluate,
    /// An evaluation set has no samples.
    #[error("data.eval \"{set}\" holds no sample of {seq_len} tokens; add data, or lower data.seq_len")]
    NoSamples {
        /// Name of the set.
        set: String,
        /// Inputs per sample.
        seq_len: usize,
    },
}

/// Describes why no token counts, and how to fix it.
fn why_nothing_counts(seq_len: usize, needed: Option<usize>) -> String {
    match needed {
        Some(needed) => format!(" within data.seq_len = {seq_len}: raise that to at least {needed}"),
        None => ": they have no assistant message and no completion, or the chat template marks none as \
                 generated; provide data with answers"
            .to_owned(),
    }
}

impl DataError {
    /// The kind of this failure.
    pub fn kind(&self) -> FailureKind {
        match self {
            DataError::Read { source, .. }
            | DataError::Copy { source, .. }
            | DataError::ChatProcess { source } => FailureKind::of_io(source),
            DataError::Store(source) => source.kind(),
            DataError::InOutput { .. }
            | DataError::NoFiles { .. }
            | DataError::Malformed { .. }
            | DataError::Expansion { .. }
            | DataError::Changed { .. }
            | DataError::Tokenizer { .. }
            | DataError::ChatTemplate { .. }
            | DataError::ChatUncontained
            | DataError::SpecialToken { .. }
            | DataError::NothingCounts { .. }
            | DataError::TooShort { .. }
            | DataError::EmptySource { .. }
            | DataError::Share { .. }
            | DataError::NothingToEvaluate
            | DataError::NoSamples { .. } => FailureKind::Input,
        }
    }

    /// Sets the key whose paths lead to a file or folder that cannot be used.
    pub(crate) fn of_key(mut self, named: &'static str) -> DataError {
        if let DataError::Read { key, .. } | DataError::InOutput { key, .. } = &mut self {
            *key = named;
        }
        self
    }
}
