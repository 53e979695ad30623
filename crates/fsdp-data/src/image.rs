//! The binary format of tokenized text, in memory or in a cache file.
//!
//! The ids come first, as four little-endian bytes each, so that a mapped file can be used as it is; the highest bit
//! marks tokens that do not count in the loss. Then comes one entry per document: the index of its file, with the form
//! of the document in the highest three bits, and its first token. Then comes a trailer: the magic number, the key of the
//! text, counts, and the CRC-64 of all bytes before it. (Entries and trailer are little-endian 64-bit words.) Nothing
//! is used before the checksum has been verified.

use std::io::{self, BufWriter, Write};

use fsdp_ckpt::digest::{Digest as Checksum, DigestKind};
use fsdp_core::Digest;

use super::special::Form;
use super::tokens::{Bytes, Scan, Tokens, Width};

/// The first word of the trailer; its last digit is the version of the format.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"fsdptok4");

/// Words of the trailer: magic, key (two), tokens, documents, skipped records, checksum.
const TRAILER_WORDS: usize = 7;

/// Bytes per word.
const WORD: usize = 8;

/// Words per document entry.
const DOCUMENT_WORDS: usize = 2;

/// Bytes that are collected before they are written. To combine checksums takes longer than to compute that of a document.
const BLOCK_BYTES: usize = 1 << 18;

/// The start of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Document {
    /// Index of its file.
    pub(super) file: usize,
    /// Index of its first token.
    pub(super) start: usize,
    /// Form of the document.
    pub(super) form: Form,
}

/// Bit position of the form within the word with the file index.
const FORM_SHIFT: u32 = 61;

/// Tokenized text.
#[derive(Debug)]
pub(super) struct Image {
    /// All tokens.
    pub(super) tokens: Tokens,
    /// Statistics of the tokens.
    pub(super) scan: Scan,
    /// The documents, in order.
    pub(super) documents: Vec<Document>,
    /// Number of skipped records.
    pub(super) skipped: u64,
}

/// Reasons why bytes are not the tokens of a text.
#[derive(Debug, thiserror::Error)]
pub(super) enum ImageFault {
    /// The bytes cannot be read.
    #[error(transparent)]
    Read(#[from] io::Error),
    /// The bytes have another format.
    #[error("it is not a file of tokenized text")]
    Foreign,
    /// The tokens belong to another text.
    #[error("it holds the tokens of another text")]
    OtherText,
    /// The length is wrong.
    #[error("it has {got_bytes} bytes, its trailer says {expected_bytes}")]
    Length {
        /// The length that follows from the trailer.
        expected_bytes: u64,
        /// The actual length.
        got_bytes: u64,
    },
    /// The checksum is wrong: the bytes have changed.
    #[error("its checksum is {got}, its trailer says {expected}")]
    Checksum {
        /// The checksum in the trailer.
        expected: Checksum,
        /// The actual checksum.
        got: Checksum,
    },
}

impl Image {
    /// Opens bytes as the tokens of the text with this key.
    ///
    /// # Errors
    /// [`ImageFault`] if they are not.
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
        let document = |entry: &[u64]| {
            let form = *Form::ALL.get((entry[0] >> FORM_SHIFT) as usize)?;
            let file = (entry[0] & !(u64::MAX << FORM_SHIFT)) as usize;
            Some(Document { file, start: entry[1] as usize, form })
        };
        let documents = words(&table).chunks_exact(DOCUMENT_WORDS).map(document).collect::<Option<_>>();
        let documents = documents.ok_or(ImageFault::Foreign)?;
        Ok(Image { tokens, scan, documents, skipped })
    }
}

/// A sink, with the checksum of all bytes that it took.
struct Summed<W> {
    sink: W,
    checksum: Checksum,
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.sink.write(bytes)?;
        self.checksum = self.checksum.then(DigestKind::Crc64.of(&bytes[..count]), count as u64);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sink.flush()
    }
}

/// Writes an [`Image`] incrementally, as text is tokenized.
pub(super) struct ImageWriter<W: Write> {
    sink: BufWriter<Summed<W>>,
    tokens: usize,
    documents: Vec<Document>,
    skipped: u64,
}

impl<W: Write> ImageWriter<W> {
    /// Starts an image without documents.
    pub(super) fn new(sink: W) -> Self {
        let summed = Summed { sink, checksum: DigestKind::Crc64.empty() };
        let sink = BufWriter::with_capacity(BLOCK_BYTES, summed);
        Self { sink, tokens: 0, documents: Vec::new(), skipped: 0 }
    }

    /// Appends a document of a file, given its marked ids.
    ///
    /// # Errors
    /// Errors of the sink.
    pub(super) fn push(&mut self, file: usize, ids: &[u32], form: Form) -> io::Result<()> {
        self.documents.push(Document { file, start: self.tokens, form });
        self.tokens += ids.len();
        ids.iter().try_for_each(|id| self.sink.write_all(&id.to_le_bytes()))
    }

    /// Counts skipped records.
    pub(super) fn skip(&mut self, count: u64) {
        self.skipped += count;
    }

    /// Writes the document table and the trailer.
    ///
    /// # Errors
    /// Errors of the sink.
    pub(super) fn finish(mut self, key: Digest) -> io::Result<W> {
        for document in &self.documents {
            self.sink.write_all(&entry(document))?;
        }
        let [high, low] = key_words(key);
        let counts = [self.tokens as u64, self.documents.len() as u64, self.skipped];
        self.sink.write_all(&bytes(&[&[MAGIC, high, low][..], &counts].concat()))?;
        let Summed { mut sink, checksum } = self.sink.into_inner().map_err(io::IntoInnerError::into_error)?;
        sink.write_all(&bytes(&[checksum.value]))?;
        sink.flush()?;
        Ok(sink)
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
