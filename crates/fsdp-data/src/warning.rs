//! Warnings about data that a run can nevertheless use.

use std::path::PathBuf;

/// A warning about data that a run can nevertheless use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DataWarning {
    /// A cache file is not used.
    #[error("{} is not used, and the text is tokenized again: {fault}", file.display())]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What is wrong with the file.
        fault: String,
    },
    /// Files of a folder are not text.
    #[error("{count} files are left out, because they are not UTF-8 text: {}", listed(files, *count))]
    NotText {
        /// Number of files.
        count: usize,
        /// The first of these files.
        files: Vec<PathBuf>,
    },
    /// Documents have no tokens.
    #[error("{count} documents are empty, such as one in {}", file.display())]
    Empty {
        /// Number of documents.
        count: usize,
        /// The file of the first empty document.
        file: PathBuf,
    },
    /// Documents are longer than a sample.
    #[error(
        "{documents} documents are clipped to data.seq_len, which leaves out {tokens} tokens; raise it, or \
         choose packing = \"stream\""
    )]
    Clipped {
        /// Number of documents.
        documents: usize,
        /// Number of tokens cut off.
        tokens: usize,
    },
    /// Lines or rows without a document are skipped, as `data.malformed = "skip"` requests.
    #[error("{count} lines or rows are left out, because they hold no document (data.malformed = \"skip\")")]
    LeftOut {
        /// Number of lines or rows.
        count: u64,
    },
    /// Documents have no token that counts in the loss.
    #[error(
        "{documents} documents are left out, because none of their first {seq_len} tokens counts \
         (data.loss_on): they have no answer, or it needs a larger data.seq_len"
    )]
    Silent {
        /// Number of documents.
        documents: usize,
        /// Inputs per sample.
        seq_len: usize,
    },
    /// Tokens cannot be cached.
    #[error(
        "tokens are not cached in {}, so each start tokenizes the text: {fault}; set data.cache to another \
         folder",
        folder.display()
    )]
    NotKept {
        /// The cache folder.
        folder: PathBuf,
        /// The reason.
        fault: String,
    },
    /// Completions have no token that ends them.
    #[error(
        "{documents} completions have no token that ends them, so the model does not learn to stop: the tokenizer names none; set \
         data.eos"
    )]
    Endless {
        /// Number of documents.
        documents: usize,
    },
    /// Answers end with no token that stops generation.
    #[error(
        "in {open} of {conversations} conversations no answer ends with a token that stops generation, so the model does \
         not learn to stop: the chat template writes none, or only the beginning of the next message, which is not an eos; \
         choose a data.chat_template that ends answers, or name that token by eos_token_id in generation_config.json \
         beside the tokenizer"
    )]
    Open {
        /// Number of such conversations.
        open: usize,
        /// Number of all conversations.
        conversations: usize,
    },
    /// A token set by `data.bos` or `data.eos` is not added to conversations.
    #[error(
        "data.bos and data.eos are not added to {conversations} conversations: the chat template writes \
         their beginning and end"
    )]
    Unframed {
        /// Number of conversations.
        conversations: usize,
    },
    /// Documents are joined without a token between them.
    #[error(
        "packing \"stream\" joins {documents} documents without a token between them, so each is continued by the next \
         one; set data.eos (or data.bos) to a token that separates them"
    )]
    Joined {
        /// Number of documents.
        documents: usize,
    },
}

impl DataWarning {
    /// Returns a warning about truncated documents, given the number of excess tokens of each; `None` if there are
    /// none.
    pub(super) fn clipped(excess: impl Iterator<Item = usize>) -> Option<DataWarning> {
        let long = excess.filter(|&tokens| tokens > 0);
        let (documents, tokens) = long.fold((0, 0), |(count, all), tokens| (count + 1, all + tokens));
        (documents > 0).then_some(DataWarning::Clipped { documents, tokens })
    }
}

/// Lists the files that a warning names, and indicates if there are more.
fn listed(files: &[PathBuf], count: usize) -> String {
    let named: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    let more = if count > files.len() { ", .." } else { "" };
    named.join(", ") + more
}
