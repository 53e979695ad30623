//! Reads JSON lines in blocks of whole lines, which workers parse.

use std::io::{BufRead, Read};

use super::batch::{BATCH_BYTES, Batch, Batches, Content, RECORD_BYTES_MAX};
use super::compressed;
use crate::error::DataError;
use crate::files::DataFile;
use crate::progress::Meter;
use crate::record::RecordPosition;
use crate::source::expansion::Bounds;

/// A mark that Windows editors write in front of UTF-8 text, and that is not part of it.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Returns batches of the lines of a file.
///
/// # Errors
/// [`DataError::Read`].
pub(super) fn open(
    index: usize,
    file: &DataFile,
    bounds: Bounds,
    meter: &Meter,
) -> Result<Batches, DataError> {
    let content = compressed::open(file, bounds, meter)?;
    Ok(Box::new(Lines { index, file: file.clone(), bounds, content, line: 1, read_bytes: 0 }))
}

struct Lines {
    index: usize,
    file: DataFile,
    bounds: Bounds,
    content: Box<dyn BufRead + Send>,
    /// Number of the next line, from 1.
    line: u64,
    /// Number of bytes read before the next line.
    read_bytes: u64,
}

impl Lines {
    /// Returns whole lines, up to a full batch; `None` at the end.
    fn read(&mut self) -> Result<Option<Batch>, DataError> {
        let (mut bytes, first) = (Vec::new(), self.line);
        let bytes_max = RECORD_BYTES_MAX.min(self.bounds.limit_bytes());
        while bytes.len() < BATCH_BYTES {
            let before = bytes.len();
            let read = (&mut self.content).take(bytes_max + 1).read_until(b'\n', &mut bytes);
            self.read_bytes += (bytes.len() - before) as u64;
            read.map_err(|source| compressed::failed(&self.file, self.read_bytes, source))?;
            let len_bytes = bytes.len() - before;
            if len_bytes == 0 {
                break;
            }
            if self.line == 1 && bytes.starts_with(BYTE_ORDER_MARK) {
                bytes.drain(..BYTE_ORDER_MARK.len());
            }
            let is_too_long = len_bytes as u64 > bytes_max;
            if is_too_long && bytes_max < RECORD_BYTES_MAX {
                let position = RecordPosition::Line(self.line);
                return Err(self.bounds.exceeded(&self.file, position, self.read_bytes));
            }
            if is_too_long {
                let reason = format!(
                    "line {} has more than {RECORD_BYTES_MAX} bytes, the maximum for a line",
                    self.line
                );
                return Err(DataError::Malformed { file: self.file.path.clone(), reason });
            }
            self.line += 1;
        }
        let content = Content::Lines { first, bytes };
        Ok((self.line > first).then_some(Batch { file: self.index, content, ahead: 0 }))
    }
}

impl Iterator for Lines {
    type Item = Result<Batch, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}
