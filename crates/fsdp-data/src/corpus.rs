//! The tokens of a list of files, and where each document starts.

use std::ops::Range;
use std::path::{Path, PathBuf};

use fsdp_config::{DataConfig, Format};

use super::cache::{self, Cached, PendingEntry, Stage};
use super::chat::Chats;
use super::encoder::Encoder;
use super::error::DataError;
use super::files::{self, DataFile, Kind};
use super::image::{Document, Image};
use super::loading::Loading;
use super::pipeline::Text;
use super::record::Fields;
use super::special::Form;
use super::tokenizer::Tokenizer;
use super::tokens::{Bytes, FULL_SCAN_BYTES_MAX, Scan, Token, Tokens, Width};
use super::warning::DataWarning;

/// Maximum number of files that a warning names.
const FILES_NAMED: usize = 3;

/// Tokens of documents, concatenated. Token files and cache files are memory-mapped, so the processes of a node share
/// them.
#[derive(Debug)]
pub(super) struct Corpus {
    files: Vec<PathBuf>,
    /// One part per token file; all tokens of text form a single part.
    parts: Vec<Part>,
    documents: Vec<Document>,
    /// Statistics of the tokens.
    pub(super) scan: Scan,
    pending: Option<PendingEntry>,
    /// Warnings for the user.
    pub(super) warnings: Vec<DataWarning>,
}

/// A contiguous block of tokens.
#[derive(Debug)]
struct Part {
    tokens: Tokens,
    /// Number of tokens in the parts before.
    start: usize,
}

impl Part {
    fn end(&self) -> usize {
        self.start + self.tokens.len()
    }
}

impl Corpus {
    /// Opens files and folders, except the output of the run, and scans the tokens.
    ///
    /// # Errors
    /// If something cannot be read or tokenized, or there is no file.
    pub(super) fn open(
        paths: &[String],
        config: &DataConfig,
        loading: &Loading<'_>,
        tokenizer: &Tokenizer,
    ) -> Result<Corpus, DataError> {
        let found = files::find(paths, config, loading.out_dir)?;
        let mut widths = found.iter().filter_map(|file| match file.kind {
            Kind::Tokens(width) => Some(width),
            Kind::Text | Kind::Jsonl | Kind::Parquet | Kind::Arrow => None,
        });
        if let Some(width) = widths.next() {
            // Only `data.format` declares token files, and it applies to all files.
            return Corpus::of_tokens(found, width);
        }
        let chats = Chats::find(config, tokenizer)?;
        let pair = [&config.prompt, &config.completion].map(Option::as_deref);
        let fields = Fields::new(config.column.as_deref()).with_pair(pair);
        let encoder = Encoder { tokenizer, fields, chats };
        let text = Text {
            files: &found,
            encoder,
            malformed: config.malformed,
            expansion_max: config.expansion_max,
            watch: loading.watch,
        };
        // The byte tokenizer needs no cache: the files already contain its tokens.
        let cached = match tokenizer.digest() {
            Some(_) => cache::tokens(&text, config, loading)?,
            None => {
                let image = cache::uncached(&text, &text.uncached_key(), loading.out_dir)?;
                Cached { image, pending: None, warnings: Vec::new() }
            }
        };
        // Every text file that was not dropped has a document.
        if cached.image.documents.is_empty() && found.iter().all(|file| file.kind == Kind::Text) {
            return Err(DataError::NoFiles {
                wanted: files::expected_files(Format::Text),
                paths: paths.to_vec(),
            });
        }
        Ok(Corpus::of_text(found, cached))
    }

    fn of_text(found: Vec<DataFile>, Cached { image, pending, mut warnings }: Cached) -> Corpus {
        warnings.extend(document_warnings(&found, &image));
        Corpus {
            files: found.into_iter().map(|file| file.path).collect(),
            parts: vec![Part { tokens: image.tokens, start: 0 }],
            documents: image.documents,
            scan: image.scan,
            pending,
            warnings,
        }
    }

    fn of_tokens(found: Vec<DataFile>, width: Width) -> Result<Corpus, DataError> {
        let files: Vec<PathBuf> = found.into_iter().map(|file| file.path).collect();
        let (mut parts, mut documents): (Vec<Part>, _) = (Vec::new(), Vec::new());
        for (index, file) in files.iter().enumerate() {
            let start = parts.last().map_or(0, Part::end);
            documents.push(Document { file: index, start, form: Form::Ids });
            parts.push(Part { tokens: token_file(file, width)?, start });
        }
        let scan = Scan::of_files(parts.iter().map(|part| &part.tokens), FULL_SCAN_BYTES_MAX);
        Ok(Corpus { files, parts, documents, scan, pending: None, warnings: Vec::new() })
    }

    /// Number of tokens.
    pub(super) fn len(&self) -> usize {
        self.parts.last().map_or(0, Part::end)
    }

    /// Writes the tokens that were made for this run into its output folder, if they are cached there, and advances to
    /// `stage`. Returns a warning if that fails.
    pub(super) fn advance_to(&self, stage: Stage) -> Option<DataWarning> {
        self.pending.as_ref().and_then(|pending| pending.advance_to(stage, self.parts[0].tokens.bytes()))
    }

    /// Returns the tokens in a range, which must lie within this corpus.
    pub(super) fn tokens(&self, range: Range<usize>) -> impl Iterator<Item = Token> {
        let first = self.parts.partition_point(|part| part.end() <= range.start);
        let Range { start, end } = range;
        let parts = self.parts[first..].iter().take_while(move |part| part.start < end);
        parts.flat_map(move |part| {
            let overlap = start.max(part.start)..end.min(part.end());
            overlap.map(|index| part.tokens.token(index - part.start))
        })
    }

    /// Number of documents.
    pub(super) fn document_count(&self) -> usize {
        self.documents.len()
    }

    /// Returns the range of a document's tokens.
    pub(super) fn document(&self, index: usize) -> Range<usize> {
        let end = self.documents.get(index + 1).map_or(self.len(), |next| next.start);
        self.documents[index].start..end
    }

    /// Returns the form of a document.
    pub(super) fn form(&self, index: usize) -> Form {
        self.documents[index].form
    }

    /// Returns the forms that occur.
    pub(super) fn forms(&self) -> impl Iterator<Item = Form> {
        Form::ALL.into_iter().filter(|form| self.documents.iter().any(|document| document.form == *form))
    }

    /// Returns the file of a document.
    pub(super) fn file_of_document(&self, index: usize) -> &Path {
        &self.files[self.documents[index].file]
    }
}

/// Returns warnings about documents, whether they were tokenized now or come from the cache.
fn document_warnings(files: &[DataFile], image: &Image) -> Vec<DataWarning> {
    let mut has_document = vec![false; files.len()];
    image.documents.iter().for_each(|document| has_document[document.file] = true);
    let is_dropped = |(file, has_document): &(&DataFile, bool)| file.kind == Kind::Text && !has_document;
    let dropped: Vec<&DataFile> =
        files.iter().zip(has_document).filter(is_dropped).map(|(file, _)| file).collect();
    let ends = image.documents.iter().skip(1).map(|next| next.start).chain([image.tokens.len()]);
    let empty: Vec<usize> = image
        .documents
        .iter()
        .zip(ends)
        .filter(|(document, end)| document.start == *end)
        .map(|(document, _)| document.file)
        .collect();
    let mut warnings = Vec::new();
    if !dropped.is_empty() {
        let named = dropped.iter().take(FILES_NAMED).map(|file| file.path.clone()).collect();
        warnings.push(DataWarning::NotText { count: dropped.len(), files: named });
    }
    if let Some(&first) = empty.first() {
        warnings.push(DataWarning::Empty { count: empty.len(), file: files[first].path.clone() });
    }
    if image.skipped > 0 {
        warnings.push(DataWarning::LeftOut { count: image.skipped });
    }
    warnings
}

fn token_file(file: &Path, width: Width) -> Result<Tokens, DataError> {
    let bytes = Bytes::open(file).map_err(|source| files::unreadable(file, source))?;
    let (len_bytes, width_bytes) = (bytes.len(), width.bytes());
    if !len_bytes.is_multiple_of(width_bytes) {
        let reason = format!(
            "it has {len_bytes} bytes, not a multiple of {width_bytes}; is it truncated, or data.format wrong?"
        );
        return Err(DataError::Malformed { file: file.to_owned(), reason });
    }
    Ok(Tokens::new(bytes, width, len_bytes / width_bytes))
}
