//! Opens files and decompresses them while they are read.

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;
use fsdp_config::input_file;

use crate::error::DataError;
use crate::files::{self, Compression, DataFile};
use crate::progress::{Meter, Metered};
use crate::record::RecordPosition;
use crate::source::expansion::Bounds;

/// Maximum size of the header of a zstd frame.
const ZSTD_HEADER_BYTES: u64 = 18;

/// Buffer size of a reader.
const BUFFER_BYTES: usize = 1 << 16;

/// Checks the size that a zstd frame may say that its content has. That of gzip is at the end of the file, where a truncated
/// one has something else.
///
/// # Errors
/// [`DataError::Expansion`] if that is more than it may be.
fn check_declared(file: &DataFile, bounds: Bounds) -> Result<(), DataError> {
    if file.compression != Some(Compression::Zstd) {
        return Ok(());
    }
    let mut head = Vec::new();
    let failed = |source| files::unreadable(&file.path, source);
    let opened = input_file::open(&file.path).map_err(failed)?;
    opened.take(ZSTD_HEADER_BYTES).read_to_end(&mut head).map_err(failed)?;
    // Without a size, or a valid header, what is read shows what is wrong.
    let made_bytes = zstd::zstd_safe::get_frame_content_size(&head).ok().flatten().unwrap_or(0);
    if made_bytes <= bounds.limit_bytes() {
        return Ok(());
    }
    Err(bounds.exceeded(file, RecordPosition::WholeFile, made_bytes))
}

/// Opens the content of a file. The memory of a decompressor is bounded, whatever the file: zstd rejects windows above
/// 128 MiB.
///
/// # Errors
/// [`DataError::Read`]; [`DataError::Expansion`] if the file says that there is more than there may be.
pub(super) fn open(
    file: &DataFile,
    bounds: Bounds,
    meter: &Meter,
) -> Result<Box<dyn BufRead + Send>, DataError> {
    check_declared(file, bounds)?;
    let failed = |source| files::unreadable(&file.path, source);
    let inner = input_file::open(&file.path).map_err(failed)?;
    let raw = BufReader::with_capacity(BUFFER_BYTES, Metered { inner, meter: meter.clone() });
    Ok(match file.compression {
        None => Box::new(raw),
        Some(Compression::Gzip) => Box::new(BufReader::with_capacity(BUFFER_BYTES, MultiGzDecoder::new(raw))),
        Some(Compression::Zstd) => {
            let decoder = zstd::Decoder::with_buffer(raw).map_err(failed)?;
            Box::new(BufReader::with_capacity(BUFFER_BYTES, decoder))
        }
    })
}

/// Returns the error for content that cannot be read. If the file is compressed, the content is damaged.
pub(super) fn failed(file: &DataFile, read_bytes: u64, source: io::Error) -> DataError {
    let name = match file.compression {
        Some(Compression::Gzip) => "gzip",
        Some(Compression::Zstd) => "zstd",
        None => return files::unreadable(&file.path, source),
    };
    let reason = format!(
        "it cannot be decompressed as {name} after byte {read_bytes} of its content: {source}; is it \
         truncated?"
    );
    DataError::Malformed { file: file.path.clone(), reason }
}
