//! What a user should know of data that a run goes on with.

use std::path::PathBuf;

/// Something about data that a run goes on with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DataWarning {
    /// A file of the cache is not used.
    #[error("{} is not used, and the text is tokenized again: {fault}", file.display())]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        fault: String,
    },
    /// Files of a folder are not text.
    #[error("{count} files are left out, because they are not UTF-8 text: {}", listed(files, *count))]
    NotText {
        /// How many.
        count: usize,
        /// The first of them.
        files: Vec<PathBuf>,
    },
    /// Documents have no token.
    #[error("{count} documents are empty, such as one in {}", file.display())]
    Empty {
        /// How many.
        count: usize,
        /// The file of the first.
        file: PathBuf,
    },
    /// Documents are longer than a sample.
    #[error(
        "{documents} documents are clipped to data.seq_len: {tokens} tokens of them are left out; raise it, or choose \
         packing = \"stream\""
    )]
    Clipped {
        /// How many.
        documents: usize,
        /// What is cut off.
        tokens: usize,
    },
    /// Lines and rows without a document, as `data.malformed = "skip"` asks.
    #[error("{count} lines or rows are left out, because they hold no document (data.malformed = \"skip\")")]
    LeftOut {
        /// How many.
        count: u64,
    },
    /// Documents without a token that counts.
    #[error(
        "{documents} documents are left out, because of their first {seq_len} tokens none counts (data.loss_on = \
         \"answers\"): there is no answer in them, or a larger data.seq_len would reach it"
    )]
    Silent {
        /// How many.
        documents: usize,
        /// Inputs per sample.
        seq_len: usize,
    },
    /// Tokens can not be kept.
    #[error(
        "tokens are not kept in {}, so each start tokenizes the text: {fault}; data.cache may name another folder",
        folder.display()
    )]
    NotKept {
        /// The folder of the cache.
        folder: PathBuf,
        /// Why not.
        fault: String,
    },
    /// Prompts whose completions nothing ends.
    #[error(
        "{documents} completions have no token that ends them, so the model does not learn to stop: the tokenizer names none; set \
         data.eos"
    )]
    Endless {
        /// How many.
        documents: usize,
    },
    /// Conversations, with a token that was to be put around documents.
    #[error(
        "data.bos and data.eos are not put around {conversations} conversations: the chat template writes what begins and \
         ends them"
    )]
    Unframed {
        /// How many.
        conversations: usize,
    },
    /// Documents are joined without a token between them.
    #[error(
        "packing \"stream\" joins {documents} documents without a token between them, so each is continued by the next \
         one; data.eos (or data.bos) names a token that separates them"
    )]
    Joined {
        /// How many.
        documents: usize,
    },
}

impl DataWarning {
    /// That documents are clipped, of each of which so many tokens are too many; none where nothing is.
    pub(super) fn clipped(excess: impl Iterator<Item = usize>) -> Option<DataWarning> {
        let long = excess.filter(|&tokens| tokens > 0);
        let (documents, tokens) = long.fold((0, 0), |(count, all), tokens| (count + 1, all + tokens));
        (documents > 0).then_some(DataWarning::Clipped { documents, tokens })
    }
}

/// The files that a warning names, and that there are more.
fn listed(files: &[PathBuf], count: usize) -> String {
    let named: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    let more = if count > files.len() { ", .." } else { "" };
    named.join(", ") + more
}
