//! Bounds what a file expands to when it is read.
//!
//! A dictionary, a run of equal values or a compressed block can turn some kilobytes into terabytes of text. Such a file is
//! damaged or made to exhaust a machine, and would otherwise be tokenized for hours.

use super::batch::Batch;
use crate::error::DataError;
use crate::files::DataFile;

/// Size, in bytes, that every file may expand to.
const FREE_BYTES: u64 = 1 << 28;

/// What a file may expand to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bounds {
    file_bytes: u64,
    /// The value of `data.expansion_max`.
    times: u64,
}

impl Bounds {
    /// The bounds of a file, which may expand to `times` its size.
    pub(crate) fn of(file: &DataFile, times: u64) -> Bounds {
        Bounds { file_bytes: file.path.metadata().map_or(0, |metadata| metadata.len()), times }
    }

    /// Maximum size of all that is read of the file, in bytes.
    pub(crate) fn limit_bytes(self) -> u64 {
        self.file_bytes.saturating_mul(self.times.max(1)).max(FREE_BYTES)
    }

    /// The error for a file that has expanded to `made_bytes` at `position`.
    pub(crate) fn exceeded(self, file: &DataFile, position: impl ToString, made_bytes: u64) -> DataError {
        DataError::Expansion {
            file: file.path.clone(),
            position: position.to_string(),
            file_bytes: self.file_bytes,
            made_bytes,
            limit_bytes: self.limit_bytes(),
            times: self.times,
        }
    }
}

/// What a file has expanded to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Expansion {
    bounds: Bounds,
    made_bytes: u64,
}

impl Expansion {
    /// Starts with nothing read of a file.
    pub(crate) fn within(bounds: Bounds) -> Expansion {
        Expansion { bounds, made_bytes: 0 }
    }

    /// Adds a batch of the file. Records that are known to follow count as well.
    ///
    /// # Errors
    /// [`DataError::Expansion`] if it expands to more than it may.
    pub(crate) fn add(&mut self, batch: &Batch, file: &DataFile) -> Result<(), DataError> {
        self.made_bytes = self.made_bytes.saturating_add(batch.cost_bytes() as u64);
        let made_bytes = self.made_bytes.saturating_add(batch.ahead_bytes());
        if made_bytes <= self.bounds.limit_bytes() {
            return Ok(());
        }
        Err(self.bounds.exceeded(file, batch.position(), made_bytes))
    }
}

#[cfg(test)]
mod tests;
