//! One writer of an export: positioned writes of whole rows into the temporary files.

use std::ops::Range;

use super::{ExportPlan, Receipt};
use crate::{
    error::Error,
    file_io::{Files, PathFile},
    floats::{CHUNK_ELEMENTS, Real, expect_convertible},
    rows::{expect_rows, whole_rows},
    safetensors::{TensorEntry, TensorType},
};

/// Writes rows of an export's tensors in place. Several writers can write different rows at the same time.
#[derive(Debug)]
pub struct ExportWriter {
    plan: ExportPlan,
    /// Each file is opened when the first row of one of its tensors is written.
    files: Vec<Option<PathFile>>,
    receipt: Receipt,
    buffer: Vec<u8>,
}

impl ExportPlan {
    /// Creates a writer for this thread. The [`Export`](super::Export) must exist by the first write.
    pub fn writer(&self) -> ExportWriter {
        ExportWriter {
            plan: self.clone(),
            files: self.files().iter().map(|_| None).collect(),
            receipt: Receipt::new(self),
            buffer: Vec::new(),
        }
    }
}

impl ExportWriter {
    /// Writes whole rows from `first_row` on, given as bytes in the tensor's dtype.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for an unknown tensor, if `bytes` are not whole rows, or the rows do not exist;
    /// [`Error::Io`], also if the disk is full. After an error, drop the export or [`abort`](super::Export::abort) it.
    pub fn write_rows(&mut self, name: &str, first_row: usize, bytes: &[u8]) -> Result<(), Error> {
        let place = self.plan.locate(name)?;
        let entry = &self.plan.files()[place.0].header.entries()[place.1];
        let rows = self.rows(entry, place.0, first_row, "bytes", bytes.len() as u64, entry.row_bytes())?;
        let offset = rows.start as u64 * entry.row_bytes();
        let [first, end] = [rows.start, rows.end].map(|row| row as u64 * entry.row_len());
        self.write_at(place, offset, bytes)?;
        self.receipt.note(place, first..end);
        Ok(())
    }

    /// Writes whole rows, converted to the tensor's dtype: `F64` exactly, `F32`, `BF16` and `F16` rounded once, to
    /// nearest.
    ///
    /// # Errors
    /// Those of [`write_rows`](Self::write_rows); [`Error::BadRequest`] for other dtypes, and if a finite value does
    /// not fit.
    pub fn write_rows_f64(&mut self, name: &str, first_row: usize, values: &[f64]) -> Result<(), Error> {
        let plan = self.plan.clone();
        let (file, tensor) = plan.locate(name)?;
        let entry = &plan.files()[file].header.entries()[tensor];
        let rows = self.rows(entry, file, first_row, "elements", values.len() as u64, entry.row_len())?;
        self.write_f64(name, rows.start as u64 * entry.row_len(), values)
    }

    /// As [`write_rows_f64`](Self::write_rows_f64), for any run of elements in the order of storage.
    ///
    /// # Errors
    /// Those of [`write_rows_f64`](Self::write_rows_f64).
    pub fn write_f64(&mut self, name: &str, first: u64, values: &[f64]) -> Result<(), Error> {
        let plan = self.plan.clone();
        let place = plan.locate(name)?;
        let file = &plan.files()[place.0];
        let entry = &file.header.entries()[place.1];
        let dtype = entry.dtype();
        expect_convertible(&file.path, name, dtype)?;
        let elements = first..first.saturating_add(values.len() as u64);
        let len = entry.len_bytes() / dtype.size_bytes() as u64;
        if elements.end > len {
            let reason =
                format!("elements {first}..{} of tensor `{name}` do not exist: it has {len}", elements.end);
            return Err(Error::bad_request(&file.path, reason));
        }
        let mut offset = first * dtype.size_bytes() as u64;
        if dtype == TensorType::F64 && cfg!(target_endian = "little") {
            self.write_at(place, offset, bytemuck::cast_slice(values))?;
        } else {
            for chunk in values.chunks(CHUNK_ELEMENTS) {
                self.write_converted(place, entry, offset, chunk)?;
                offset += (chunk.len() * dtype.size_bytes()) as u64;
            }
        }
        self.receipt.note(place, elements);
        Ok(())
    }

    /// Makes everything written durable and returns a receipt for it.
    ///
    /// # Errors
    /// [`Error::Io`] if a file cannot be made durable.
    pub fn finish(self) -> Result<Receipt, Error> {
        self.files.iter().flatten().try_for_each(PathFile::sync)?;
        Ok(self.receipt)
    }

    fn write_converted(
        &mut self,
        place: (usize, usize),
        entry: &TensorEntry,
        offset: u64,
        values: &[f64],
    ) -> Result<(), Error> {
        let size_bytes = entry.dtype().size_bytes();
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(values.len() * size_bytes, 0);
        let path = &self.plan.files()[place.0].path;
        f64::encode(entry.dtype(), values, &mut buffer)
            .map_err(|found| found.in_tensor(path, entry.name(), offset / size_bytes as u64))?;
        self.write_at(place, offset, &buffer)?;
        self.buffer = buffer;
        Ok(())
    }

    /// The range of rows that `got` units from `first_row` on make up; fails if these are not whole rows of the tensor.
    fn rows(
        &self,
        entry: &TensorEntry,
        file: usize,
        first_row: usize,
        unit: &str,
        got: u64,
        row: u64,
    ) -> Result<Range<usize>, Error> {
        let path = &self.plan.files()[file].path;
        let count = whole_rows(path, entry.name(), unit, got, row)?;
        let rows = first_row..first_row.saturating_add(count);
        expect_rows(path, entry.name(), &rows, entry.row_count())?;
        Ok(rows)
    }

    /// Writes bytes at an offset of a tensor. The caller checks that they are inside of it.
    fn write_at(&mut self, (file, tensor): (usize, usize), offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let planned = &self.plan.files()[file];
        let start = planned.header.data_start() + planned.header.entries()[tensor].data_range().start;
        let open = match self.files[file].take() {
            Some(open) => open,
            None => Files::anywhere().open_for_writing(&planned.temporary)?,
        };
        let written = open.write_all_at(bytes, start + offset);
        self.files[file] = Some(open);
        written
    }
}
