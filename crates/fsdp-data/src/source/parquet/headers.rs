//! Reads as much of Parquet's headers as shows whether the library can be trusted with them: it parses nested schemas by
//! recursion, and reserves the memory that the header of a page asks for.
//!
//! Headers are structs in Thrift's compact protocol.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The last bytes of a file: the length of its footer, and a mark.
const TAIL_BYTES: u64 = 8;

/// Number of bytes in which the header of a page is looked for first, and at most; headers may have statistics.
const HEADER_BYTES: (u64, u64) = (1 << 10, 1 << 24);

/// Maximum nesting of the structs and lists of a header.
const NESTED_MAX: usize = 32;

/// The nesting of the schema of a file; `None` if it has no footer, or a damaged one.
///
/// # Errors
/// If the file cannot be read.
pub(super) fn schema_depth(file: &File) -> io::Result<Option<usize>> {
    let len = file.metadata()?.len();
    let Some(footer_end) = len.checked_sub(TAIL_BYTES) else { return Ok(None) };
    let mut tail = [0; 4];
    file.read_exact_at(&mut tail, footer_end)?;
    let footer_len = u64::from(u32::from_le_bytes(tail));
    let Some(start) = footer_end.checked_sub(footer_len) else { return Ok(None) };
    let mut footer = vec![0; footer_len as usize];
    file.read_exact_at(&mut footer, start)?;
    Ok(depth_in(&footer))
}

/// The nesting of the schema in a footer.
fn depth_in(footer: &[u8]) -> Option<usize> {
    let mut depth = 0;
    let read = |reader: &mut Reader<'_>, field: i64, kind: u8| {
        if (field, kind) != (2, LIST) {
            return reader.skip(kind, 0);
        }
        let (count, kind) = reader.list()?;
        if kind != STRUCT {
            return None;
        }
        // How many elements follow in each of the open groups.
        let mut open: Vec<i64> = Vec::new();
        for _ in 0..count {
            while open.last() == Some(&0) {
                open.pop();
            }
            if let Some(left) = open.last_mut() {
                *left -= 1;
            }
            let mut children = 0;
            reader.fields(&mut |reader, field, kind| match (field, kind) {
                (5, I32) => reader.integer().map(|value| children = value),
                _ => reader.skip(kind, 0),
            })?;
            if children > 0 {
                open.push(children);
                depth = depth.max(open.len());
            }
        }
        Some(())
    };
    Reader(footer).fields(&mut { read })?;
    Some(depth)
}

/// The size of the largest page of a column, without compression; `None` if the header of a page is damaged.
///
/// # Errors
/// If the file cannot be read.
pub(super) fn largest_page(file: &File, (start, len): (u64, u64)) -> io::Result<Option<u64>> {
    let (mut at, end) = (start, start.saturating_add(len).min(file.metadata()?.len()));
    let mut largest = 0;
    while at < end {
        let Some(page) = page_header(file, at, end)? else { return Ok(None) };
        largest = largest.max(page.bytes);
        at += page.header_len + page.compressed_bytes;
    }
    Ok(Some(largest))
}

struct PageHeader {
    header_len: u64,
    /// Size of the page without compression.
    bytes: u64,
    compressed_bytes: u64,
}

fn page_header(file: &File, at: u64, end: u64) -> io::Result<Option<PageHeader>> {
    let mut len = HEADER_BYTES.0;
    loop {
        let mut bytes = vec![0; len.min(end - at) as usize];
        file.read_exact_at(&mut bytes, at)?;
        let (mut reader, mut sizes) = (Reader(&bytes), [0; 2]);
        let read = reader.fields(&mut |reader, field, kind| match (field, kind) {
            (2 | 3, I32) => reader.integer().map(|value| sizes[field as usize - 2] = value),
            _ => reader.skip(kind, 0),
        });
        if read.is_some() {
            let header_len = (bytes.len() - reader.0.len()) as u64;
            let [bytes, compressed_bytes] = sizes.map(u64::try_from);
            let sizes = bytes.ok().zip(compressed_bytes.ok());
            return Ok(sizes.map(|(bytes, compressed_bytes)| PageHeader {
                header_len,
                bytes,
                compressed_bytes,
            }));
        }
        if len >= HEADER_BYTES.1 || len >= end - at {
            return Ok(None);
        }
        len *= 8;
    }
}

/// Kinds of values.
const BYTE: u8 = 3;
const I16: u8 = 4;
const I32: u8 = 5;
const I64: u8 = 6;
const DOUBLE: u8 = 7;
const BINARY: u8 = 8;
const LIST: u8 = 9;
const SET: u8 = 10;
const MAP: u8 = 11;
const STRUCT: u8 = 12;
const UUID: u8 = 13;

/// The unread bytes. Everything returns `None` at the end of the bytes and where they make no sense.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*byte)
    }

    fn skip_bytes(&mut self, len: u64) -> Option<()> {
        self.0 = self.0.get(usize::try_from(len).ok()?..)?;
        Some(())
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    /// A signed integer.
    fn integer(&mut self) -> Option<i64> {
        let value = self.varint()?;
        Some((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    /// The number and kind of the elements of a list.
    fn list(&mut self) -> Option<(u64, u8)> {
        let head = self.byte()?;
        let count = if head >> 4 == 15 { self.varint()? } else { u64::from(head >> 4) };
        Some((count, head & 15))
    }

    /// Calls `read` with the number and kind of each field of a struct, whose value it must read.
    fn fields(&mut self, read: &mut dyn FnMut(&mut Self, i64, u8) -> Option<()>) -> Option<()> {
        let mut field = 0_i64;
        loop {
            let head = self.byte()?;
            if head == 0 {
                return Some(());
            }
            field = if head >> 4 == 0 { self.integer()? } else { field.checked_add(i64::from(head >> 4))? };
            read(self, field, head & 15)?;
        }
    }

    fn skip(&mut self, kind: u8, depth: usize) -> Option<()> {
        if depth > NESTED_MAX {
            return None;
        }
        match kind {
            // The kind of a boolean field is its value.
            1 | 2 => Some(()),
            BYTE => self.skip_bytes(1),
            I16 | I32 | I64 => self.varint().map(drop),
            DOUBLE => self.skip_bytes(8),
            BINARY => {
                let len = self.varint()?;
                self.skip_bytes(len)
            }
            LIST | SET => {
                let (count, kind) = self.list()?;
                (0..count).try_for_each(|_| self.skip_element(kind, depth))
            }
            MAP => {
                let count = self.varint()?;
                let kinds = if count == 0 { 0 } else { self.byte()? };
                (0..count).try_for_each(|_| {
                    self.skip_element(kinds >> 4, depth)?;
                    self.skip_element(kinds & 15, depth)
                })
            }
            STRUCT => self.fields(&mut |reader, _, kind| reader.skip(kind, depth + 1)),
            UUID => self.skip_bytes(16),
            _ => None,
        }
    }

    /// Skips an element of a list or map, where a boolean takes a byte.
    fn skip_element(&mut self, kind: u8, depth: usize) -> Option<()> {
        if matches!(kind, 1 | 2) { self.skip_bytes(1) } else { self.skip(kind, depth + 1) }
    }
}

#[cfg(test)]
mod tests;
