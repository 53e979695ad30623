//! `extends = "base.toml"`: a run file that builds on another one.

use std::fs;
use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::error::ConfigError;
use crate::input_file::{self, CONFIG_BYTES_MAX};

/// The key that names the base file.
pub(super) const KEY: &str = "extends";

/// Maximum number of files in a chain. People write two or three.
const FILES_MAX: usize = 16;

/// Reads a run file and all files that it extends, the run file first. The `extends` keys are removed from the tables.
///
/// # Errors
/// If a file cannot be read or is not TOML, if `extends` is not a path, if a file extends itself, or if there are more than
/// [`FILES_MAX`].
pub(super) fn read(path: &Path) -> Result<Vec<(String, Table)>, ConfigError> {
    let (file, text) = read_text(path)?;
    let invalid = |source| ConfigError::Toml { origin: file.clone(), source: Box::new(source) };
    let mut files = vec![(file.clone(), toml::from_str(&text).map_err(invalid)?)];
    let mut paths = vec![path.to_owned()];
    while let Some(base) = take_base(files.last_mut().expect("there is one"), &paths)? {
        if files.len() == FILES_MAX {
            return Err(ConfigError::ExtendsTooMany {
                chain: files.into_iter().map(|(file, _)| file).collect(),
            });
        }
        let origin = &files.last().expect("there is one").0;
        let (file, text) = read_text(&base)?;
        let table = toml::from_str(&text).map_err(|fault| not_run_file(&fault, &text, (origin, &file)))?;
        files.push((file, table));
        paths.push(base);
    }
    Ok(files)
}

/// Merges the files: the keys of a file override those of the files that it extends. Tables are merged key by key; all
/// other values, including lists, are replaced.
pub(super) fn join(files: &[(String, Table)]) -> Table {
    let mut joined = Table::new();
    files.iter().rev().for_each(|(_, table)| merge(&mut joined, table));
    joined
}

fn merge(base: &mut Table, overrides: &Table) {
    for (key, value) in overrides {
        match (base.get_mut(key), value) {
            (Some(Value::Table(base)), Value::Table(overrides)) => merge(base, overrides),
            _ => drop(base.insert(key.clone(), value.clone())),
        }
    }
}

/// Reads a file; also returns its name for errors.
fn read_text(path: &Path) -> Result<(String, String), ConfigError> {
    let text = input_file::read_text(path, CONFIG_BYTES_MAX)
        .map_err(|source| ConfigError::Read { file: path.to_owned(), source })?;
    Ok((path.display().to_string(), text))
}

/// The error of a base that is not TOML, which does not quote it.
fn not_run_file(fault: &toml::de::Error, text: &str, (origin, file): (&str, &str)) -> ConfigError {
    let before = fault.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    ConfigError::NotRunFile { origin: origin.to_owned(), file: file.to_owned(), line }
}

/// Takes `extends` out of a table and returns the path that it names, relative to the folder of the file.
fn take_base(
    (origin, table): &mut (String, Table),
    paths: &[PathBuf],
) -> Result<Option<PathBuf>, ConfigError> {
    let Some(value) = table.remove(KEY) else { return Ok(None) };
    let Some(name) = value.as_str().filter(|name| !name.is_empty()) else {
        let (origin, key, value) = (origin.clone(), KEY.to_owned(), value.to_string());
        return Err(ConfigError::Value { origin, key, value, allowed: "the path of a run file".to_owned() });
    };
    let file = paths.last().expect("a file was read").parent().unwrap_or(Path::new("")).join(name);
    let is_same_file = |other: &PathBuf| match (fs::canonicalize(other), fs::canonicalize(&file)) {
        (Ok(one), Ok(other)) => one == other,
        _ => other == &file,
    };
    match paths.iter().any(is_same_file) {
        true => Err(ConfigError::ExtendsItself { origin: origin.clone(), file }),
        false => Ok(Some(file)),
    }
}

#[cfg(test)]
mod tests;
