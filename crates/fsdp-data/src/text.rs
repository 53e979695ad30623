//! Text files, and their tokens.

use std::io::{self, Write};

use fsdp_core::Digest;

use super::encoder::Encoder;
use super::error::DataError;
use super::files;
use super::image::{ImageWriter, MAGIC};
use super::pipeline::{self, Encoded, Text};
use super::stamp::Stamp;
use super::tokens::Bytes;

/// Version of the tokenizer library; another version may produce other tokens for the same text.
const TOKENIZERS: &str = "0.22.2";

/// Identifies the tokens of a text.
#[derive(Debug)]
pub(super) struct Key {
    /// Digest of everything that determines the tokens, including the bytes of the files.
    pub(super) digest: Digest,
    /// State of the files when they were read for the digest.
    stamps: Vec<Stamp>,
}

/// Reasons why there are no tokens.
#[derive(Debug, thiserror::Error)]
pub(super) enum TokenizeFault {
    /// The text is at fault.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The tokens cannot be written.
    #[error(transparent)]
    Write(#[from] io::Error),
}

impl Text<'_> {
    /// Computes the key of everything that determines the tokens.
    ///
    /// # Errors
    /// [`DataError::Read`].
    pub(super) fn key(&self) -> Result<Key, DataError> {
        let mut key = Key { digest: self.key_without_files(), stamps: Vec::with_capacity(self.files.len()) };
        for file in self.files {
            let failed = |source| files::unreadable(&file.path, source);
            let stamp = Stamp::of(&file.path).map_err(failed)?;
            let bytes = Bytes::open(&file.path).map_err(failed)?;
            // The name of a file does not matter, but whether the user named it does: invalid UTF-8 is an error in a
            // named file, and drops other files.
            let facts = (file.named, file.kind, file.compression, bytes.len(), Bytes::digest(&bytes));
            key.digest = key.digest.and(&facts);
            key.stamps.push(stamp);
        }
        Ok(key)
    }

    /// Writes the tokens of a text as an [`Image`](super::image::Image).
    ///
    /// # Errors
    /// If the text cannot be read or tokenized, or has changed since its key was computed, or if the sink cannot be
    /// written.
    pub(super) fn tokenize<W: Write>(&self, sink: W, key: &Key) -> Result<W, TokenizeFault> {
        let mut image = ImageWriter::new(sink);
        pipeline::run(self, |Encoded { file, ids, ends, skipped }| -> Result<(), TokenizeFault> {
            let starts = std::iter::once(0).chain(ends.iter().map(|&(end, _)| end));
            for (start, &(end, form)) in starts.zip(&ends) {
                image.push(file, &ids[start..end], form)?;
            }
            image.skip(skipped);
            Ok(())
        })?;
        for (file, stamp) in self.files.iter().zip(&key.stamps) {
            if Stamp::of(&file.path).ok() != Some(*stamp) {
                return Err(DataError::Changed { file: file.path.clone() }.into());
            }
        }
        Ok(image.finish(key.digest)?)
    }

    /// Returns a key that no cache file has, for tokens that are not cached; it is computed without reading the files.
    pub(super) fn uncached_key(&self) -> Key {
        Key { digest: self.key_without_files(), stamps: Vec::new() }
    }

    /// Computes the key without files. It does not include the special tokens that packing adds, because they are not
    /// part of the cached tokens.
    fn key_without_files(&self) -> Digest {
        let Encoder { tokenizer, fields, chats } = &self.encoder;
        Digest::of(&(MAGIC, TOKENIZERS, tokenizer.digest(), fields, chats.digest(), self.malformed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokenizers_version_matches_lockfile() {
        let lock = include_str!("../../../Cargo.lock");
        let entry = format!("name = \"tokenizers\"\nversion = \"{TOKENIZERS}\"\n");
        assert!(lock.contains(&entry), "another version of tokenizers is built in: TOKENIZERS must name it");
    }
}
