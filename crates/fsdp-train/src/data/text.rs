//! Text files, and the tokens they become.

use std::io::{self, Write};

use fsdp_core::Digest;
use serde::Deserialize;

use super::error::DataError;
use super::files::{self, DataFile};
use super::image::ImageWriter;
use super::tokenizer::Tokenizer;
use super::tokens::Bytes;
use crate::config::Format;
use crate::input_file;

/// The version of the library that makes tokens: another one may make others of the same text.
const TOKENIZERS: &str = "0.22.2";

/// Files of text, with what makes tokens of them.
pub(super) struct Text<'a> {
    /// The files.
    pub(super) files: &'a [DataFile],
    /// [`Format::Text`] or [`Format::Jsonl`].
    pub(super) format: Format,
    /// What makes the tokens.
    pub(super) tokenizer: &'a Tokenizer,
}

/// Why there are no tokens.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotTokenized {
    /// The text is at fault.
    #[error(transparent)]
    Data(#[from] DataError),
    /// They can not be written.
    #[error(transparent)]
    Write(#[from] io::Error),
}

/// A line of a `.jsonl` file; other keys are not read.
#[derive(Deserialize)]
struct Line {
    text: String,
}

impl Text<'_> {
    /// Stands for all that decides the tokens, bytes of the files included.
    ///
    /// # Errors
    /// [`DataError::Read`].
    pub(super) fn key(&self) -> Result<Digest, DataError> {
        let add = |key: Digest, file: &DataFile| {
            let bytes = Bytes::open(&file.path).map_err(|source| files::unreadable(&file.path, source))?;
            Ok(and_file(key, file, &bytes))
        };
        self.files.iter().try_fold(self.key_of_none(), add)
    }

    /// Writes the tokens as an [`Image`](super::image::Image); returns the key of the text that was read.
    ///
    /// # Errors
    /// Text that can not be read or tokenized, or a sink that can not be written.
    pub(super) fn tokenize<W: Write>(&self, sink: W) -> Result<(W, Digest), NotTokenized> {
        tracing::info!(files = self.files.len(), "text is tokenized");
        let mut image = ImageWriter::new(sink);
        let mut key = self.key_of_none();
        for (index, file) in self.files.iter().enumerate() {
            let bytes = input_file::read(&file.path, u64::MAX)
                .map_err(|source| files::unreadable(&file.path, source))?;
            key = and_file(key, file, &bytes);
            let text = match utf8(file, bytes) {
                Err(_) if self.format == Format::Text && !file.named => continue,
                text => text?,
            };
            if self.format == Format::Jsonl {
                self.push_lines(&mut image, index, &text)?;
            } else {
                image.push(index, &self.tokenizer.encode(&text, &file.path)?)?;
            }
        }
        Ok((image.finish(key)?, key))
    }

    fn push_lines<W: Write>(
        &self,
        image: &mut ImageWriter<W>,
        file: usize,
        text: &str,
    ) -> Result<(), NotTokenized> {
        let path = &self.files[file].path;
        for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let malformed = |fault| {
                let line = index + 1;
                let reason = format!(
                    "line {line}: {fault}; every line must be an object with a string under \"text\""
                );
                DataError::Malformed { file: path.clone(), reason }
            };
            let line: Line = serde_json::from_str(line).map_err(malformed)?;
            image.push(file, &self.tokenizer.encode(&line.text, path)?)?;
        }
        Ok(())
    }

    /// The key before any file. What packing adds to documents is not in the tokens, so it is not here either.
    fn key_of_none(&self) -> Digest {
        Digest::of(&(TOKENIZERS, self.tokenizer.digest(), self.format))
    }
}

/// A file counts by its length and checksum, and by whether the user named it: what is then an error else drops the file.
/// Its name does not count.
fn and_file(key: Digest, file: &DataFile, bytes: &[u8]) -> Digest {
    key.and(&(file.named, bytes.len(), Bytes::digest(bytes)))
}

fn utf8(file: &DataFile, bytes: Vec<u8>) -> Result<String, DataError> {
    String::from_utf8(bytes).map_err(|error| {
        let valid_bytes = error.utf8_error().valid_up_to();
        let reason =
            format!("it is not UTF-8 text (byte {valid_bytes}); convert it, or choose another data.format");
        DataError::Malformed { file: file.path.clone(), reason }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_holds_the_version_of_the_library_that_is_built_in() {
        let lock = include_str!("../../../../Cargo.lock");
        let entry = format!("name = \"tokenizers\"\nversion = \"{TOKENIZERS}\"\n");
        assert!(lock.contains(&entry), "another version of tokenizers is built in: TOKENIZERS must name it");
    }
}
