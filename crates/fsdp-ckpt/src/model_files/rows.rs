//! Reads rows as bytes, or converted in bounded chunks to `f64`.

use std::ops::Range;

use super::ModelReader;
use crate::{
    error::Error,
    floats::{CHUNK_ELEMENTS, decode, expect_convertible},
    rows::expect_len,
    safetensors::{SafetensorsReader, TensorEntry, TensorType},
};

impl ModelReader {
    /// Fills `out` with the bytes of whole rows of a tensor, in the dtype of the file.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for an unknown tensor, and if the rows do not exist or do not match the length of `out`;
    /// [`Error::Io`].
    pub fn read_rows(&self, name: &str, rows: Range<usize>, out: &mut [u8]) -> Result<(), Error> {
        self.locate(name)?.read_rows(name, rows, out)
    }

    /// Fills `out` with the elements of whole rows of an `F64`, `F32`, `BF16` or `F16` tensor, exactly.
    ///
    /// # Errors
    /// Those of [`read_rows`](Self::read_rows); [`Error::BadRequest`] for other dtypes.
    pub fn read_rows_f64(&self, name: &str, rows: Range<usize>, out: &mut [f64]) -> Result<(), Error> {
        let file = self.locate(name)?;
        let entry = file.entry(name)?;
        expect_convertible(file.path(), name, entry.dtype())?;
        let bytes = file.rows_to_bytes(entry, &rows)?;
        let expected = rows.len() as u64 * entry.row_len();
        expect_len(file.path(), name, "elements", expected, out.len() as u64)?;
        if entry.dtype() == TensorType::F64 && cfg!(target_endian = "little") {
            return file.read_bytes(entry, bytes.start, bytemuck::cast_slice_mut(out));
        }
        read_converted(file, entry, bytes.start, out)
    }
}

fn read_converted(
    file: &SafetensorsReader,
    entry: &TensorEntry,
    offset_bytes: u64,
    out: &mut [f64],
) -> Result<(), Error> {
    let size_bytes = entry.dtype().size_bytes();
    let mut buffer = vec![0; out.len().min(CHUNK_ELEMENTS) * size_bytes];
    let mut offset = offset_bytes;
    for chunk in out.chunks_mut(CHUNK_ELEMENTS) {
        let bytes = &mut buffer[..chunk.len() * size_bytes];
        file.read_bytes(entry, offset, bytes)?;
        decode(entry.dtype(), bytes, chunk);
        offset += bytes.len() as u64;
    }
    Ok(())
}
