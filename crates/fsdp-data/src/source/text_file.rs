//! Reads text files, each of which is one document.

use std::io::Read;
use std::iter;

use fsdp_config::input_file;

use super::batch::{Batch, Batches, Content, RECORD_BYTES_MAX};
use super::compressed;
use crate::error::DataError;
use crate::files::{self, DataFile};
use crate::progress::Meter;
use crate::record::RecordPosition;
use crate::source::expansion::Bounds;

/// Returns the only document of a file.
///
/// # Errors
/// [`DataError::Read`].
pub(super) fn open(
    index: usize,
    file: &DataFile,
    bounds: Bounds,
    meter: &Meter,
) -> Result<Batches, DataError> {
    let bytes = match file.compression {
        // The file takes as much memory as it takes on disk, so there is no limit.
        None => {
            let read = input_file::read(&file.path, u64::MAX);
            let bytes = read.map_err(|fault| files::unreadable(&file.path, fault))?;
            meter.add(bytes.len() as u64);
            bytes
        }
        Some(_) => decompressed(file, bounds, meter)?,
    };
    Ok(Box::new(iter::once(Ok(Batch { file: index, content: Content::WholeFile(bytes), ahead: 0 }))))
}

fn decompressed(file: &DataFile, bounds: Bounds, meter: &Meter) -> Result<Vec<u8>, DataError> {
    let (mut bytes, bytes_max) = (Vec::new(), RECORD_BYTES_MAX.min(bounds.limit_bytes()));
    let read = compressed::open(file, bounds, meter)?.take(bytes_max + 1).read_to_end(&mut bytes);
    read.map_err(|source| compressed::failed(file, bytes.len() as u64, source))?;
    let made_bytes = bytes.len() as u64;
    if made_bytes > bytes_max && bytes_max < RECORD_BYTES_MAX {
        return Err(bounds.exceeded(file, RecordPosition::WholeFile, made_bytes));
    }
    if made_bytes > bytes_max {
        let reason = format!(
            "it is one document of more than {RECORD_BYTES_MAX} bytes, the maximum to decompress; split it \
             into documents"
        );
        return Err(DataError::Malformed { file: file.path.clone(), reason });
    }
    Ok(bytes)
}
