//! Tokens of text as bytes, in memory or in a file of the cache.
//!
//! The ids come first, four little-endian bytes each, so that a mapped file is used as it is; the highest bit says that a
//! token does not count. Then one entry per document: the index of its file, with what it was before in the
//! highest two bits, and its first token. Then a trailer: what this is, the key of the text, counts, and CRC-64 of all
//! that stands before it. (All are little-endian words of 64 bits.) Nothing is believed before the checksum fits.

use std::io::{self, Write};

use fsdp_ckpt::digest::{Digest as Checksum, DigestKind};
use fsdp_core::Digest;

use super::special::Form;
use super::tokens::{Bytes, Scan, Tokens, Width};

/// The first word of a trailer; its last digit is the version of this format.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"fsdptok3");

/// Words of a trailer: magic, key (two), tokens, documents, records that were left out, checksum.
const TRAILER_WORDS: usize = 7;

/// Bytes of a word.
const WORD: usize = 8;

/// Words of the entry of a document.
const DOCUMENT_WORDS: usize = 2;

/// Ids that are written at once.
const BLOCK_TOKENS: usize = 1 << 16;

/// Where a document begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Document {
    /// The index of its file.
    pub(super) file: usize,
    /// Its first token.
    pub(super) start: usize,
    /// What it was before.
    pub(super) form: Form,
}

/// Where the number of a form begins in the word of the index of a file.
const FORM_SHIFT: u32 = 62;

/// Tokens of text.
#[derive(Debug)]
pub(super) struct Image {
    /// All tokens.
    pub(super) tokens: Tokens,
    /// What is known of them.
    pub(super) scan: Scan,
    /// The documents, in order.
    pub(super) documents: Vec<Document>,
    /// Records that were left out.
    pub(super) skipped: u64,
}

/// Why bytes are not the tokens of a text.
#[derive(Debug, thiserror::Error)]
pub(super) enum ImageFault {
    /// They can not be read.
    #[error(transparent)]
    Read(#[from] io::Error),
    /// They are something else.
    #[error("it holds no tokens of text")]
    Foreign,
    /// They are of another text.
    #[error("it holds the tokens of another text")]
    OtherText,
    /// They are too many or too few.
    #[error("it has {got_bytes} bytes, its trailer says {expected_bytes}")]
    Length {
        /// What the trailer says.
        expected_bytes: u64,
        /// What is there.
        got_bytes: u64,
    },
    /// Some have changed.
    #[error("its checksum is {got}, its trailer says {expected}")]
    Checksum {
        /// What the trailer says.
        expected: Checksum,
        /// What is there.
        got: Checksum,
    },
}

impl Image {
    /// Takes bytes for the tokens of the text with this key.
    ///
    /// # Errors
    /// [`ImageFault`], if they are not.
    pub(super) fn open(bytes: Bytes, key: Digest) -> Result<Image, ImageFault> {
        let (body, trailer) =
            bytes.split_last_chunk::<{ TRAILER_WORDS * WORD }>().ok_or(ImageFault::Foreign)?;
        let [magic, high, low, tokens, documents, skipped, checksum] =
            std::array::from_fn(|word| words(trailer)[word]);
        if magic != MAGIC {
            return Err(ImageFault::Foreign);
        }
        if [high, low] != key_words(key) {
            return Err(ImageFault::OtherText);
        }
        let ids_bytes = tokens.saturating_mul(Width::U32.bytes() as u64);
        let table_bytes = documents.saturating_mul((DOCUMENT_WORDS * WORD) as u64);
        let expected_bytes = ids_bytes.saturating_add(table_bytes).saturating_add(trailer.len() as u64);
        let got_bytes = bytes.len() as u64;
        if expected_bytes != got_bytes {
            return Err(ImageFault::Length { expected_bytes, got_bytes });
        }
        let (table, trailer) = (body[body.len() - table_bytes as usize..].to_vec(), *trailer);
        let tokens = Tokens::new(bytes, Width::Marked, tokens as usize);
        let scan = tokens.scan();
        let got = [&*table, &trailer[..trailer.len() - WORD]]
            .iter()
            .fold(scan.digest, |all, part| all.then(Bytes::digest(part), part.len() as u64));
        let expected = Checksum { kind: DigestKind::Crc64, value: checksum };
        if expected != got {
            return Err(ImageFault::Checksum { expected, got });
        }
        let document = |entry: &[u64]| Document {
            file: (entry[0] & !(u64::MAX << FORM_SHIFT)) as usize,
            start: entry[1] as usize,
            form: Form::ALL[(entry[0] >> FORM_SHIFT) as usize],
        };
        let documents = words(&table).chunks_exact(DOCUMENT_WORDS).map(document).collect();
        Ok(Image { tokens, scan, documents, skipped })
    }
}

/// Writes an [`Image`] while text becomes tokens.
pub(super) struct ImageWriter<W> {
    sink: W,
    checksum: Checksum,
    tokens: usize,
    documents: Vec<Document>,
    skipped: u64,
}

impl<W: Write> ImageWriter<W> {
    /// An image of no document.
    pub(super) fn new(sink: W) -> Self {
        Self { sink, checksum: DigestKind::Crc64.empty(), tokens: 0, documents: Vec::new(), skipped: 0 }
    }

    /// Adds a document of a file, by its marked ids.
    ///
    /// # Errors
    /// Those of the sink.
    pub(super) fn push(&mut self, file: usize, ids: &[u32], form: Form) -> io::Result<()> {
        self.documents.push(Document { file, start: self.tokens, form });
        self.tokens += ids.len();
        ids.chunks(BLOCK_TOKENS).try_for_each(|block| {
            let block: Vec<u32> = block.iter().map(|id| id.to_le()).collect();
            self.write(bytemuck::cast_slice(&block))
        })
    }

    /// Notes records that were left out.
    pub(super) fn skip(&mut self, count: u64) {
        self.skipped += count;
    }

    /// Writes what stands behind the ids.
    ///
    /// # Errors
    /// Those of the sink.
    pub(super) fn finish(mut self, key: Digest) -> io::Result<W> {
        let documents = std::mem::take(&mut self.documents);
        let table: Vec<u8> = documents.iter().flat_map(entry).collect();
        self.write(&table)?;
        let [high, low] = key_words(key);
        let counts = [self.tokens as u64, documents.len() as u64, self.skipped];
        self.write(&bytes(&[&[MAGIC, high, low][..], &counts].concat()))?;
        self.sink.write_all(&bytes(&[self.checksum.value]))?;
        self.sink.flush()?;
        Ok(self.sink)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.checksum = self.checksum.then(DigestKind::Crc64.of(bytes), bytes.len() as u64);
        self.sink.write_all(bytes)
    }
}

fn entry(document: &Document) -> Vec<u8> {
    let form = (document.form as u64) << FORM_SHIFT;
    bytes(&[document.file as u64 | form, document.start as u64])
}

fn key_words(key: Digest) -> [u64; 2] {
    key.words().map(i64::cast_unsigned)
}

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|&word| u64::from_le_bytes(word)).collect()
}

fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
