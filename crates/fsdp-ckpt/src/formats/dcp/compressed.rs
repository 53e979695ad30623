//! Items that are zstd streams.
//!
//! A stream records neither its decoded length nor a checksum. Only the beginning of a tensor's stream is decoded here:
//! up to its storage, an archive can be read in the order in which it was written. The maximum length of the rest
//! follows from the metadata. Values are decoded whole, up to a limit.

use std::io::Read;

use zstd::stream::read::Decoder;

use super::items::{Found, ItemFile, Job, check_records};
use crate::{
    bytes::{Memory, RangeReader, Section},
    error::Error,
    torch,
};

/// Bytes that are decoded to find a tensor; also the most that may follow its elements.
const BEGINNING_LEN: u64 = 64 << 10;
/// Maximum decoded length of a value.
const VALUE_LEN_MAX: u64 = 256 << 20;
/// Largest window that a stream may request, as a power of two; equal to the default limit of the format.
const WINDOW_LOG_MAX: u32 = 27;

pub(super) fn find(file: &ItemFile, job: &Job<'_>) -> Result<Found, Error> {
    let (limit, decoded_len_max) = match job.data_len() {
        Some(len) => (BEGINNING_LEN, len.saturating_add(2 * BEGINNING_LEN)),
        None => (VALUE_LEN_MAX, VALUE_LEN_MAX),
    };
    let failed = |cause: String| {
        Error::malformed(&*file.path, format!("{} cannot be decompressed: {cause}", job.name()))
    };
    // One byte beyond the limit shows whether the stream ends there.
    let mut decoded = decode(file, job, limit + 1).map_err(|cause| failed(cause.to_string()))?;
    let is_whole = decoded.len() as u64 <= limit;
    if !is_whole && job.chunk.is_none() {
        return Err(failed(format!("it has more than {limit} bytes")));
    }
    decoded.truncate(limit as usize);

    let name = job.name();
    let bytes = Memory(decoded);
    let section = Section::new(&bytes, 0..bytes.0.len() as u64, &file.path, &name);
    let (torch, protections) = if is_whole {
        let torch = torch::open(section)?;
        let protections = check_records(section, &torch, &file.path)?;
        (torch, protections)
    } else {
        (torch::open_beginning(section, decoded_len_max)?, Vec::new())
    };
    Ok(Found {
        path: file.path.clone(),
        file_len: file.len,
        item: torch.root,
        protections,
        decoded_len_max: Some(decoded_len_max),
    })
}

fn decode(file: &ItemFile, job: &Job<'_>, len_max: u64) -> std::io::Result<Vec<u8>> {
    let compressed = RangeReader { file: &file.file, range: job.location.range.clone() };
    let mut decoder = Decoder::new(compressed)?;
    decoder.window_log_max(WINDOW_LOG_MAX)?;
    let mut decoded = Vec::new();
    decoder.take(len_max).read_to_end(&mut decoded)?;
    Ok(decoded)
}
