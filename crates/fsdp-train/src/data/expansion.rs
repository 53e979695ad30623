//! Bounds what a file expands to when it is read.
//!
//! A dictionary, a run of equal values or a compressed block can turn some kilobytes into terabytes of text. Such a file is
//! damaged or made to exhaust a machine, and would otherwise be tokenized for hours.

use super::error::DataError;
use super::files::DataFile;
use super::source::Batch;

/// Size, in bytes, that every file may expand to.
const FREE_BYTES: u64 = 1 << 28;

/// What a file has expanded to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Expansion {
    file_bytes: u64,
    made_bytes: u64,
}

impl Expansion {
    /// Starts with nothing read of a file.
    pub(super) fn of(file: &DataFile) -> Expansion {
        let file_bytes = file.path.metadata().map_or(0, |metadata| metadata.len());
        Expansion { file_bytes, made_bytes: 0 }
    }

    /// Adds a batch of the file, which may expand to `times` its size.
    ///
    /// # Errors
    /// [`DataError::Expansion`] if it expands to more.
    pub(super) fn add(&mut self, batch: &Batch, file: &DataFile, times: u64) -> Result<(), DataError> {
        self.made_bytes = self.made_bytes.saturating_add(batch.cost_bytes() as u64);
        let limit_bytes = self.file_bytes.saturating_mul(times.max(1)).max(FREE_BYTES);
        if self.made_bytes <= limit_bytes {
            return Ok(());
        }
        Err(DataError::Expansion {
            file: file.path.clone(),
            position: batch.position().to_string(),
            file_bytes: self.file_bytes,
            made_bytes: self.made_bytes,
            limit_bytes,
            times,
        })
    }
}

#[cfg(test)]
mod tests;
