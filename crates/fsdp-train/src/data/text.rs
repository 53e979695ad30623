//! Text files, and the tokens they become.

use std::io::{self, Write};

use fsdp_core::Digest;

use super::encoder::Encoder;
use super::error::DataError;
use super::files::{self, DataFile};
use super::image::{ImageWriter, MAGIC};
use super::pipeline::{self, Encoded};
use super::progress::Watch;
use super::stamp::Stamp;
use super::tokens::Bytes;
use crate::config::Malformed;

/// The version of the library that makes tokens: another one may make others of the same text.
const TOKENIZERS: &str = "0.22.2";

/// Files of records, with what makes tokens of them.
pub(super) struct Text<'a> {
    /// The files: all but those of tokens.
    pub(super) files: &'a [DataFile],
    /// What makes the tokens.
    pub(super) encoder: Encoder<'a>,
    /// What becomes of records without a document.
    pub(super) malformed: Malformed,
    /// Who is told how far it is.
    pub(super) watch: &'a Watch<'a>,
}

/// What stands for a text.
#[derive(Debug)]
pub(super) struct Key {
    /// All that decides the tokens, bytes of the files included.
    pub(super) digest: Digest,
    /// The files, as they were read for it.
    stamps: Vec<Stamp>,
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

impl Text<'_> {
    /// Stands for all that decides the tokens.
    ///
    /// # Errors
    /// [`DataError::Read`].
    pub(super) fn key(&self) -> Result<Key, DataError> {
        let mut key = Key { digest: self.key_of_none(), stamps: Vec::with_capacity(self.files.len()) };
        for file in self.files {
            let failed = |source| files::unreadable(&file.path, source);
            let stamp = Stamp::of(&file.path).map_err(failed)?;
            let bytes = Bytes::open(&file.path).map_err(failed)?;
            // The name of a file does not count; whether the user named it does: what is then an error else drops the file.
            let facts = (file.named, file.kind, file.compression, bytes.len(), Bytes::digest(&bytes));
            key.digest = key.digest.and(&facts);
            key.stamps.push(stamp);
        }
        Ok(key)
    }

    /// Writes the tokens of a text as an [`Image`](super::image::Image).
    ///
    /// # Errors
    /// Text that can not be read or tokenized, or has changed since its key was made; a sink that can not be written.
    pub(super) fn tokenize<W: Write>(&self, sink: W, key: &Key) -> Result<W, NotTokenized> {
        let mut image = ImageWriter::new(sink);
        pipeline::run(self, |Encoded { file, ids, ends, skipped }| -> Result<(), NotTokenized> {
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

    /// A key that no file of the cache has, for tokens that are not kept: nothing is read for it.
    pub(super) fn key_of_none_kept(&self) -> Key {
        Key { digest: self.key_of_none(), stamps: Vec::new() }
    }

    /// The key before any file. What packing adds to documents is not in the tokens, so it is not here either.
    fn key_of_none(&self) -> Digest {
        let Encoder { tokenizer, fields, chats } = &self.encoder;
        Digest::of(&(MAGIC, TOKENIZERS, tokenizer.digest(), fields, chats.digest(), self.malformed))
    }
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
