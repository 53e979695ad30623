//! Items that are stored uncompressed.
//!
//! An archive has its directory at the end, and headers and the pickle at the beginning, with only tensor elements in
//! between. So two reads find everything, and a single read does for a small item.

use std::ops::Range;

use super::items::{Found, ItemFile, Job, check_records};
use crate::{
    bytes::{ReadAt, Section},
    error::Error,
    file_io::PathFile,
    torch,
};

/// Bytes that are read at each end of an item. PyTorch writes about 1 KiB before a tensor's data and as much after it.
const WINDOW_LEN: u64 = 2048;

pub(super) fn find(file: &ItemFile, job: &Job<'_>) -> Result<Found, Error> {
    let range = job.location.range.clone();
    let bytes = Ends::read(&file.file, range.clone())?;
    let name = job.name();
    let section = Section::new(&bytes, range, &file.path, &name);
    let torch = torch::open(section)?;
    let protections = check_records(section, &torch, &file.path)?;
    let path = file.path.clone();
    Ok(Found { path, file_len: file.len, item: torch.root, protections, decoded_len_max: None })
}

/// A range of a file with both of its ends in memory.
struct Ends<'a> {
    file: &'a PathFile,
    head: (u64, Vec<u8>),
    tail: (u64, Vec<u8>),
}

impl<'a> Ends<'a> {
    fn read(file: &'a PathFile, range: Range<u64>) -> Result<Ends<'a>, Error> {
        let len = range.end - range.start;
        let head_end = if len <= 2 * WINDOW_LEN { range.end } else { range.start + WINDOW_LEN };
        let tail_start = head_end.max(range.end.saturating_sub(WINDOW_LEN));
        let read = |range: Range<u64>| {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            file.read_exact_at(&mut bytes, range.start)?;
            Ok::<_, Error>((range.start, bytes))
        };
        Ok(Ends { file, head: read(range.start..head_end)?, tail: read(tail_start..range.end)? })
    }
}

impl ReadAt for Ends<'_> {
    fn read_exact_at(&self, out: &mut [u8], offset: u64) -> Result<(), Error> {
        for (start, bytes) in [&self.head, &self.tail] {
            let at = offset.checked_sub(*start).and_then(|at| usize::try_from(at).ok());
            let end = at.and_then(|at| at.checked_add(out.len()));
            if let (Some(at), Some(end)) = (at, end)
                && end <= bytes.len()
            {
                out.copy_from_slice(&bytes[at..end]);
                return Ok(());
            }
        }
        self.file.read_exact_at(out, offset)
    }
}
