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
    let mut files = vec![read_file(path)?];
    let mut paths = vec![path.to_owned()];
    while let Some(base) = take_base(files.last_mut().expect("there is one"), &paths)? {
        if files.len() == FILES_MAX {
            return Err(ConfigError::ExtendsTooMany {
                chain: files.into_iter().map(|(file, _)| file).collect(),
            });
        }
        let origin = &files.last().expect("there is one").0;
        let file = read_file(&base).map_err(|error| unquoted(error, origin))?;
        files.push(file);
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

fn read_file(path: &Path) -> Result<(String, Table), ConfigError> {
    let origin = path.display().to_string();
    let text = input_file::read_text(path, CONFIG_BYTES_MAX)
        .map_err(|source| ConfigError::Read { file: path.to_owned(), source })?;
    let table = toml::from_str(&text)
        .map_err(|source| ConfigError::Toml { origin: origin.clone(), source: Box::new(source) })?;
    Ok((origin, table))
}

/// Replaces the error of a base that is not TOML by one that does not quote it.
fn unquoted(error: ConfigError, origin: &str) -> ConfigError {
    let ConfigError::Toml { origin: file, source } = error else { return error };
    let text = source.to_string();
    let line = text.split("at line ").nth(1).and_then(|rest| rest.split(',').next()?.trim().parse().ok());
    ConfigError::NotRunFile { origin: origin.to_owned(), file, line: line.unwrap_or(1) }
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
