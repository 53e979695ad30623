//! Determines the kinds of files by `data.format` and by their names.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use fsdp_config::Format;

use super::DataFile;
use super::saved::{self, Saved};
use crate::error::DataError;
use crate::tokens::Width;

/// Maximum number of files named in the error for a folder whose data is ambiguous.
const OTHERS_NAMED: usize = 3;

/// Kind of a file's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A text document.
    Text,
    /// JSON objects, one per line.
    Jsonl,
    /// Rows, in row groups.
    Parquet,
    /// Rows, in record batches.
    Arrow,
    /// Token ids.
    Tokens(Width),
}

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    /// gzip: `.gz`.
    Gzip,
    /// zstd: `.zst`.
    Zstd,
}

/// Describes the files that a folder is searched for.
pub(crate) fn expected_files(format: Format) -> &'static str {
    match format {
        Format::Auto => "files",
        Format::Text => "UTF-8 text files",
        Format::Jsonl => "*.jsonl files",
        Format::Parquet => "*.parquet files",
        Format::Arrow => "*.arrow files",
        Format::TokensU16 | Format::TokensU32 => "*.bin files",
    }
}

/// A name in lower case: its extension before that of a compression, and the compression.
struct Name {
    extension: String,
    compression: Option<Compression>,
    /// Whether `datasets` gives such names to files that it computes from data.
    is_derived: bool,
}

impl Name {
    fn of(path: &Path) -> Name {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        let (rest, compression) = match name.rsplit_once('.') {
            Some((rest, "gz")) => (rest, Some(Compression::Gzip)),
            Some((rest, "zst")) => (rest, Some(Compression::Zstd)),
            _ => (&*name, None),
        };
        let extension = rest.rsplit_once('.').map_or("", |(_, extension)| extension);
        let is_derived = extension == "arrow" && (name.starts_with("cache-") || name == "indices.arrow");
        Name { extension: extension.to_owned(), compression, is_derived }
    }

    /// Returns the kind if the name is that of a record format.
    fn record_kind(&self) -> Option<Kind> {
        match (&*self.extension, self.compression) {
            ("jsonl" | "ndjson", _) => Some(Kind::Jsonl),
            ("parquet", None) => Some(Kind::Parquet),
            ("arrow", None) if !self.is_derived => Some(Kind::Arrow),
            _ => None,
        }
    }

    /// Whether such files accompany data without being data: descriptions of data sets, and files that `datasets`
    /// computes.
    fn is_companion(&self) -> bool {
        let is_description =
            matches!(&*self.extension, "" | "json" | "lock" | "md" | "py" | "txt" | "yaml" | "yml");
        self.is_derived || is_description && self.compression.is_none()
    }
}

/// Returns a file that the user named.
///
/// # Errors
/// [`DataError::Malformed`] if its name does not tell its kind, or if its kind cannot be read compressed.
pub(super) fn named_file(path: PathBuf, format: Format) -> Result<DataFile, DataError> {
    let name = Name::of(&path);
    let kind = match format {
        Format::Auto => by_name(&name).map_err(|reason| malformed(&path, &reason))?,
        Format::Text => Kind::Text,
        Format::Jsonl => Kind::Jsonl,
        Format::Parquet => Kind::Parquet,
        Format::Arrow => Kind::Arrow,
        Format::TokensU16 => Kind::Tokens(Width::U16),
        Format::TokensU32 => Kind::Tokens(Width::U32),
    };
    if name.compression.is_some() && matches!(kind, Kind::Parquet | Kind::Arrow | Kind::Tokens(_)) {
        return Err(malformed(
            &path,
            "compressed files of tokens, Parquet or Arrow are not supported; decompress it",
        ));
    }
    Ok(DataFile { path, named: true, kind, compression: name.compression })
}

fn by_name(name: &Name) -> Result<Kind, String> {
    if let Some(kind) = name.record_kind() {
        return Ok(kind);
    }
    let unclear = |which: &str| format!("its name does not show its format; set data.format to {which}");
    match &*name.extension {
        "json" => Err(unclear("\"jsonl\" or \"text\"")),
        "bin" => Err(unclear("\"tokens-u16\" or \"tokens-u32\"")),
        "arrow" if name.compression.is_none() => Ok(Kind::Arrow),
        "arrow" | "parquet" => {
            Err("compressed Parquet and Arrow files are not supported; decompress it".to_owned())
        }
        _ => Ok(Kind::Text),
    }
}

/// Returns the files of a folder that are data.
///
/// # Errors
/// [`DataError::Malformed`] if it is ambiguous which files are data.
pub(super) fn folder_files(
    folder: &Path,
    found: Vec<PathBuf>,
    format: Format,
) -> Result<Vec<DataFile>, DataError> {
    let format = if format == Format::Auto { detect_format(folder, &found)? } else { format };
    let saved = if format == Format::Arrow { Saved::among(&found)? } else { Vec::new() };
    let mut files = Vec::new();
    for path in found {
        if saved.iter().any(|saved| saved.excludes(&path)) {
            continue;
        }
        let name = Name::of(&path);
        if !name_matches(&name, format) {
            continue;
        }
        // In a folder of text, other compressed files are not text, or not a single document.
        let compression = name.compression.filter(|_| format != Format::Text || name.extension == "txt");
        files.push(DataFile { named: false, compression, ..named_file(path, format)? });
    }
    Ok(files)
}

/// Determines the format of a folder when none is set.
fn detect_format(folder: &Path, found: &[PathBuf]) -> Result<Format, DataError> {
    let names: Vec<Name> = found.iter().map(|path| Name::of(path)).collect();
    let count = |kind: Kind| names.iter().filter(|name| name.record_kind() == Some(kind)).count();
    let is_other = |(_, name): &(&PathBuf, &Name)| name.record_kind().is_none() && !name.is_companion();
    let others: Vec<&Path> = found.iter().zip(&names).filter(is_other).map(|(path, _)| &**path).collect();
    let check_split = || expect_one_split(folder, found);
    match (count(Kind::Parquet), count(Kind::Jsonl), count(Kind::Arrow), others.len()) {
        (0, 0, 0, _) => Ok(Format::Text),
        (_, 0, 0, 0) => check_split().map(|()| Format::Parquet),
        (0, _, 0, 0) => check_split().map(|()| Format::Jsonl),
        (0, 0, _, 0) => {
            saved::expect_one_split(folder, found).and_then(|()| check_split()).map(|()| Format::Arrow)
        }
        (parquet, jsonl, arrow, count) => {
            let named: Vec<String> =
                others.iter().take(OTHERS_NAMED).map(|path| path.display().to_string()).collect();
            let named = if named.is_empty() { String::new() } else { format!(" ({})", named.join(", ")) };
            let formats = [(parquet, "parquet"), (jsonl, "jsonl"), (arrow, "arrow")];
            let first = formats.iter().find(|(count, _)| *count > 0).map_or("", |(_, format)| format);
            let reason = format!(
                "it holds {parquet} Parquet files, {jsonl} files of JSON lines, {arrow} Arrow files and {count} others{named}; set \
                 data.format to that of the data, such as data.format = \"{first}\"; the rest is ignored"
            );
            Err(malformed(folder, &reason))
        }
    }
}

/// Words in the names of files and folders that denote the split of a data set, as Hugging Face reads them.
const SPLITS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "val", "dev"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// Rejects folders with several splits, so that a run does not train on evaluation data that is in the same folder.
fn expect_one_split(folder: &Path, found: &[PathBuf]) -> Result<(), DataError> {
    let data = found.iter().filter(|path| Name::of(path).record_kind().is_some());
    let splits: BTreeSet<&str> = data.filter_map(|path| split(folder, path)).collect();
    if splits.len() < 2 {
        return Ok(());
    }
    let splits = Vec::from_iter(splits).join(", ");
    let reason = format!(
        "it holds the splits {splits}; name the files of one by a pattern, such as {}",
        folder.join("**/train-*").display()
    );
    Err(malformed(folder, &reason))
}

/// Returns the split that the path of a file in a folder names, if any.
fn split(folder: &Path, path: &Path) -> Option<&'static str> {
    let inside = path.strip_prefix(folder).unwrap_or(path).to_string_lossy().to_lowercase();
    let words: Vec<&str> = inside.split(|letter: char| !letter.is_alphanumeric()).collect();
    let is_named =
        |(_, spellings): &&(&str, &[&str])| spellings.iter().any(|spelling| words.contains(spelling));
    SPLITS.iter().find(is_named).map(|(split, _)| *split)
}

/// Whether a file in a folder of this format is data.
pub(super) fn has_data_name(path: &Path, format: Format) -> bool {
    name_matches(&Name::of(path), format)
}

fn name_matches(name: &Name, format: Format) -> bool {
    match format {
        Format::Auto | Format::Text => true,
        Format::Jsonl => name.record_kind() == Some(Kind::Jsonl),
        Format::Parquet => name.record_kind() == Some(Kind::Parquet),
        Format::Arrow => name.record_kind() == Some(Kind::Arrow),
        Format::TokensU16 | Format::TokensU32 => name.extension == "bin" && name.compression.is_none(),
    }
}

pub(super) fn malformed(path: &Path, reason: &str) -> DataError {
    DataError::Malformed { file: path.to_owned(), reason: reason.to_owned() }
}
