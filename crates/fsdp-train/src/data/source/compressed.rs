//! Opens files and decompresses them while they are read.

use std::io::{self, BufRead, BufReader};

use flate2::bufread::MultiGzDecoder;

use crate::data::error::DataError;
use crate::data::files::{self, Compression, DataFile};
use crate::data::progress::{Meter, Metered};
use crate::input_file;

/// Buffer size of a reader.
const BUFFER_BYTES: usize = 1 << 16;

/// Opens the content of a file. The memory of a decompressor is bounded, whatever the file: zstd rejects windows above
/// 128 MiB.
///
/// # Errors
/// [`DataError::Read`].
pub(super) fn open(file: &DataFile, meter: &Meter) -> Result<Box<dyn BufRead + Send>, DataError> {
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
