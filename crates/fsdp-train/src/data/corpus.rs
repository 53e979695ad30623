//! All tokens of a list of files, and where each document starts.
//!
//! Tokens are kept in memory, four bytes each; the ranks of a process share them.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::error::DataError;
use super::files::{self, DataFile};
use super::tokenizer::Tokenizer;
use crate::config::Format;
use crate::input_file;

/// Tokens of documents, one after the other.
#[derive(Debug)]
pub(super) struct Corpus {
    files: Vec<PathBuf>,
    tokens: Vec<u32>,
    documents: Vec<Document>,
}

#[derive(Debug)]
struct Document {
    file: usize,
    start: usize,
}

/// A line of a `.jsonl` file; other keys are not read.
#[derive(Deserialize)]
struct Line {
    text: String,
}

impl Corpus {
    /// Reads files and folders, but nothing in `out_dir`.
    ///
    /// # Errors
    /// If something cannot be read or tokenized, or there is no file.
    pub(super) fn read(
        paths: &[String],
        format: Format,
        out_dir: &Path,
        tokenizer: &Tokenizer,
    ) -> Result<Corpus, DataError> {
        let mut corpus = Corpus { files: Vec::new(), tokens: Vec::new(), documents: Vec::new() };
        for file in files::find(paths, format, out_dir)? {
            let bytes = input_file::read(&file.path, u64::MAX)
                .map_err(|source| files::unreadable(&file.path, source))?;
            match format {
                Format::Text => corpus.push_text(file, bytes, tokenizer)?,
                Format::Jsonl => corpus.push_jsonl(file, bytes, tokenizer)?,
                Format::TokensU16 => {
                    corpus.push_tokens(file, &bytes, |id: [u8; 2]| u32::from(u16::from_le_bytes(id)))?;
                }
                Format::TokensU32 => corpus.push_tokens(file, &bytes, u32::from_le_bytes)?,
            }
        }
        if corpus.files.is_empty() {
            return Err(DataError::NoFiles { wanted: files::wanted(format), paths: paths.to_vec() });
        }
        Ok(corpus)
    }

    /// All tokens.
    pub(super) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The number of documents.
    pub(super) fn document_count(&self) -> usize {
        self.documents.len()
    }

    /// The tokens of a document.
    pub(super) fn document(&self, index: usize) -> &[u32] {
        let end = self.documents.get(index + 1).map_or(self.tokens.len(), |next| next.start);
        &self.tokens[self.documents[index].start..end]
    }

    /// The file of a document.
    pub(super) fn file_of_document(&self, index: usize) -> &Path {
        &self.files[self.documents[index].file]
    }

    /// The file of a token.
    pub(super) fn file_of_token(&self, index: usize) -> &Path {
        let after = self.documents.partition_point(|document| document.start <= index);
        self.file_of_document(after.checked_sub(1).expect("the first document starts at token 0"))
    }

    fn push_text(&mut self, file: DataFile, bytes: Vec<u8>, tokenizer: &Tokenizer) -> Result<(), DataError> {
        let text = match utf8(&file, bytes) {
            Err(_) if !file.named => return Ok(()),
            text => text?,
        };
        let tokens = tokenizer.encode(&text, &file.path)?;
        let file = self.push_file(file);
        self.push_document(file, tokens);
        Ok(())
    }

    fn push_jsonl(&mut self, file: DataFile, bytes: Vec<u8>, tokenizer: &Tokenizer) -> Result<(), DataError> {
        let text = utf8(&file, bytes)?;
        let path = file.path.clone();
        let file = self.push_file(file);
        for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let line: Line = serde_json::from_str(line).map_err(|source| DataError::Jsonl {
                file: path.clone(),
                line: index + 1,
                source,
            })?;
            let tokens = tokenizer.encode(&line.text, &path)?;
            self.push_document(file, tokens);
        }
        Ok(())
    }

    fn push_tokens<const WIDTH: usize>(
        &mut self,
        file: DataFile,
        bytes: &[u8],
        id: fn([u8; WIDTH]) -> u32,
    ) -> Result<(), DataError> {
        let (ids, rest) = bytes.as_chunks::<WIDTH>();
        if !rest.is_empty() {
            return Err(DataError::TornTokens {
                file: file.path,
                len_bytes: bytes.len(),
                width_bytes: WIDTH,
            });
        }
        let file = self.push_file(file);
        self.push_document(file, ids.iter().map(|&bytes| id(bytes)));
        Ok(())
    }

    fn push_file(&mut self, file: DataFile) -> usize {
        self.files.push(file.path);
        self.files.len() - 1
    }

    fn push_document(&mut self, file: usize, tokens: impl IntoIterator<Item = u32>) {
        self.documents.push(Document { file, start: self.tokens.len() });
        self.tokens.extend(tokens);
    }
}

fn utf8(file: &DataFile, bytes: Vec<u8>) -> Result<String, DataError> {
    String::from_utf8(bytes).map_err(|error| DataError::NotUtf8 {
        file: file.path.clone(),
        offset_bytes: error.utf8_error().valid_up_to(),
    })
}
