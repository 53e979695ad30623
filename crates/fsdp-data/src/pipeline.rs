//! From files to tokens, on all cores and in bounded memory.
//!
//! Files are read in *rounds* of some megabytes. While all threads tokenize one round, the next is read; then the
//! tokens are passed on in the order of the records. The contents of a round depend only on the files, so the tokens,
//! and which error is reported, do not depend on the number of threads. At most two rounds are in memory.

use std::sync::atomic::{AtomicUsize, Ordering};

use fsdp_config::Malformed;
use rayon::prelude::*;

use super::chat::EncodeFault;
use super::encoder::{EncodedDocument, Encoder, Read};
use super::error::DataError;
use super::files::{DataFile, Kind};
use super::progress::{Meter, Tokenizing, Watch};
use super::record::RecordPosition;
use super::source::{self, Batch, Batches, Bounds, Expansion, RecordFault};
use super::special::Form;

/// Size of a round, in bytes before tokenizing.
const ROUND_BYTES: usize = 1 << 24;

/// Maximum number of batches per round: in the worst case, each is a small file of its own.
const ROUND_BATCHES: usize = 1 << 12;

/// Files of records, and the encoder that tokenizes them.
pub(super) struct Text<'a> {
    /// The files, none of which are token files.
    pub(super) files: &'a [DataFile],
    /// Turns records into tokens.
    pub(super) encoder: Encoder<'a>,
    /// What to do with records without a document.
    pub(super) malformed: Malformed,
    /// Maximum size of the content of a file, in times its size.
    pub(super) expansion_max: u64,
    /// Receives the progress.
    pub(super) watch: &'a Watch<'a>,
}

/// The tokens of a batch.
pub(super) struct Encoded {
    /// Index of the file.
    pub(super) file: usize,
    /// Marked tokens of the documents, concatenated.
    pub(super) ids: Vec<u32>,
    /// The end of each document, and its form.
    pub(super) ends: Vec<(usize, Form)>,
    /// Number of records that were skipped because they have no document.
    pub(super) skipped: u64,
}

impl Encoded {
    fn push(&mut self, document: &EncodedDocument) {
        self.ids.extend_from_slice(&document.ids);
        self.ends.push((self.ids.len(), document.form));
    }

    /// Returns the number of tokens of each document, and its form.
    pub(super) fn documents(&self) -> impl Iterator<Item = (usize, Form)> {
        let starts = std::iter::once(0).chain(self.ends.iter().map(|&(end, _)| end));
        starts.zip(&self.ends).map(|(start, &(end, form))| (end - start, form))
    }
}

/// Tokenizes all records, and passes the tokens on in order.
///
/// # Errors
/// The first invalid record, or the first error of `write`.
pub(super) fn run<E: From<DataError>>(
    text: &Text<'_>,
    mut write: impl FnMut(Encoded) -> Result<(), E>,
) -> Result<(), E> {
    let all_bytes =
        text.files.iter().filter_map(|file| file.path.metadata().ok()).map(|metadata| metadata.len()).sum();
    tracing::info!(files = text.files.len(), "tokenizing text");
    let mut progress = Tokenizing { read_bytes: 0, all_bytes, documents: 0, tokens: 0, is_done: false };
    // The first round may take long, for example if it has a word of megabytes.
    text.watch.report(progress);
    let mut reader = Reader::new(text);
    let mut round = reader.round(ROUND_BYTES)?;
    while !round.is_empty() {
        // Bytes of the next round, read at the same time, do not count as tokenized yet.
        progress.read_bytes = reader.meter.total();
        let (encoded, next) = rayon::join(|| encode_round(text, round), || reader.round(ROUND_BYTES));
        for batch in encoded? {
            progress.documents += batch.ends.len() as u64;
            progress.tokens += batch.ids.len() as u64;
            write(batch)?;
        }
        round = next?;
        text.watch.report(progress);
    }
    text.watch.report(Tokenizing { is_done: true, ..progress });
    Ok(())
}

/// The tokens of the first records.
pub(super) struct Beginning {
    /// The tokens, by batch.
    pub(super) encoded: Vec<Encoded>,
    /// Bytes of the records.
    pub(super) bytes: usize,
    /// Whether there are no further records.
    pub(super) is_all: bool,
}

/// Tokenizes the first records, of about `bytes` bytes.
///
/// # Errors
/// The first invalid record.
pub(super) fn beginning(text: &Text<'_>, bytes: usize) -> Result<Beginning, DataError> {
    let mut reader = Reader::new(text);
    let mut round = reader.round(bytes)?;
    let is_cut = round.last_mut().is_some_and(|last| last.cut(bytes));
    let is_all = !is_cut && reader.batch()?.is_none();
    let bytes = round.iter().map(Batch::len_bytes).sum();
    Ok(Beginning { encoded: encode_round(text, round)?, bytes, is_all })
}

/// Reads about `bytes` bytes of the files that may expand without saying so, and does not tokenize them.
///
/// # Errors
/// If one of them expands beyond its bounds, or cannot be read that far.
pub(super) fn check_expansion(text: &Text<'_>, bytes: usize) -> Result<(), DataError> {
    let is_silent = |file: &&DataFile| file.compression.is_some() || file.kind == Kind::Arrow;
    let silent: Vec<DataFile> = text.files.iter().filter(is_silent).cloned().collect();
    let mut reader = Reader { files: &silent, ..Reader::new(text) };
    let mut read = 0;
    while let Some(batch) = reader.batch()?.filter(|_| read < bytes) {
        read += batch.cost_bytes();
    }
    Ok(())
}

/// Reads files one after the other.
struct Reader<'a> {
    files: &'a [DataFile],
    encoder: &'a Encoder<'a>,
    /// Index of the next file to open.
    next: usize,
    /// The remaining batches of the open file.
    open: Option<Batches>,
    /// What the open file has expanded to.
    expansion: Expansion,
    /// The value of `data.expansion_max`.
    expansion_max: u64,
    meter: Meter,
}

impl<'a> Reader<'a> {
    fn new(text: &'a Text<'_>) -> Reader<'a> {
        Reader {
            files: text.files,
            encoder: &text.encoder,
            next: 0,
            open: None,
            expansion: Expansion::default(),
            expansion_max: text.expansion_max,
            meter: Meter::default(),
        }
    }

    /// Returns the batches of the next round: about `round_bytes` bytes or what is left of the files, and nothing at
    /// the end.
    fn round(&mut self, round_bytes: usize) -> Result<Vec<Batch>, DataError> {
        let (mut round, mut bytes) = (Vec::new(), 0);
        while bytes < round_bytes && round.len() < ROUND_BATCHES {
            let Some(batch) = self.batch()? else { break };
            bytes += batch.cost_bytes();
            round.push(batch);
        }
        Ok(round)
    }

    fn batch(&mut self) -> Result<Option<Batch>, DataError> {
        loop {
            if let Some(batch) = self.open.as_mut().and_then(Iterator::next) {
                let batch = batch?;
                self.expansion.add(&batch, &self.files[batch.file])?;
                return Ok(Some(batch));
            }
            let Some(file) = self.files.get(self.next) else { return Ok(None) };
            let bounds = Bounds::of(file, self.expansion_max);
            self.open = Some(source::open(self.next, file, bounds, &self.encoder.fields, &self.meter)?);
            self.expansion = Expansion::within(bounds);
            self.next += 1;
        }
    }
}

/// Tokenizes the batches of a round. Batches after an error are left out.
///
/// # Errors
/// The first in the order of the records.
fn encode_round(text: &Text<'_>, round: Vec<Batch>) -> Result<Vec<Encoded>, DataError> {
    let first_failed = AtomicUsize::new(usize::MAX);
    let encode = |(index, batch)| {
        if first_failed.load(Ordering::Relaxed) < index {
            return None;
        }
        let encoded = encode_batch(text, batch);
        if encoded.is_err() {
            first_failed.fetch_min(index, Ordering::Relaxed);
        }
        Some(encoded)
    };
    let encoded: Vec<_> = round.into_par_iter().enumerate().map(encode).collect();
    encoded.into_iter().flatten().collect()
}

/// Tokenizes a batch up to its first error.
fn encode_batch(text: &Text<'_>, batch: Batch) -> Result<Encoded, DataError> {
    let (file, encoder) = (&text.files[batch.file], &text.encoder);
    let mut out = Encoded { file: batch.file, ids: Vec::new(), ends: Vec::new(), skipped: 0 };
    let mut records = Vec::new();
    batch.for_each(&encoder.fields, |(position, record)| {
        let read = |record| encoder.read(record).map_err(RecordFault::Malformed);
        records.push((position, record.and_then(read)));
    });
    let conversations = records.iter().filter_map(|(_, record)| match record {
        Ok(Read::Conversation(json)) => Some(json.as_slice()),
        _ => None,
    });
    let mut scripts = encoder.chats.scripts(conversations.collect())?;
    for (position, record) in &records {
        let fault = match record {
            Ok(Read::Document(document)) => {
                out.push(document);
                continue;
            }
            Ok(Read::Conversation(_)) => {
                match scripts.next().and_then(|script| encoder.conversation(&script)) {
                    Ok(document) => {
                        out.push(&document);
                        continue;
                    }
                    Err(EncodeFault::Record(fault)) => RecordFault::Malformed(fault),
                    Err(EncodeFault::Data(fault)) => return Err(fault),
                    Err(EncodeFault::Template(fault)) => {
                        let place = format!("{}, {position}", file.path.display());
                        return Err(encoder.chats.template_fault(format!("{fault} ({place})")));
                    }
                }
            }
            Err(fault) => fault.clone(),
        };
        match fault {
            // Folders of text usually contain files that are not UTF-8, so these are dropped. A file named by the user
            // must be text.
            RecordFault::NotText(_) if !file.named => {}
            _ if text.malformed == Malformed::Skip => out.skipped += 1,
            fault => return Err(malformed(file, *position, &fault)),
        }
    }
    Ok(out)
}

fn malformed(file: &DataFile, position: RecordPosition, fault: &RecordFault) -> DataError {
    let reason = match fault {
        RecordFault::NotText(byte) => {
            format!("it is not UTF-8 text (byte {byte}); convert it, or choose another data.format")
        }
        RecordFault::Malformed(reason) if position == RecordPosition::WholeFile => reason.clone(),
        RecordFault::Malformed(reason) => format!("{position}: {reason}"),
    };
    DataError::Malformed { file: file.path.clone(), reason }
}

#[cfg(test)]
mod tests;
