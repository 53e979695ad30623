//! Reads rows of any checkpoint's tensors as floats, and verifies the bytes against the checksums of the format.

use std::{ops::Range, path::Path};

use super::{Found, steps::Count};
use crate::{
    checkpoint::{Checkpoint, Tensor},
    error::Error,
    file_io::Files,
    floats::{self, CHUNK_ELEMENTS},
    rows::{expect_len, expect_rows},
    safetensors::TensorType,
    transfer::{Options, PieceSizes, Reading, SourceFiles, TensorReader, scratch_bytes},
};

/// A reader of tensor rows, for one thread.
pub struct StateRows<'a> {
    sources: SourceFiles<'a>,
    options: Options<'a>,
    bytes: Vec<u8>,
    scratch: Vec<u8>,
}

impl<'a> StateRows<'a> {
    /// Makes all tensors that were found readable by rows: compressed items are decoded to an unnamed temporary file.
    ///
    /// # Errors
    /// [`Error::Malformed`] for a damaged item, [`Error::Io`], [`Error::Canceled`].
    pub fn new(found: &'a Found, options: Options<'a>) -> Result<StateRows<'a>, Error> {
        let checkpoint = &found.checkpoint;
        let mut sources = SourceFiles::new(&Files::anywhere(), checkpoint);
        let counts = found.counts.iter().flatten().map(|count| &count.name);
        let names =
            found.weights.iter().flatten().chain(found.states.iter().flatten().flatten()).chain(counts);
        let tensors = names.filter_map(|name| checkpoint.tensors.get_key_value(name));
        let readers: Vec<TensorReader> =
            tensors.map(|(name, tensor)| TensorReader::new(name, tensor)).collect();
        let is_zstd = |source: usize| checkpoint.sources[source].is_compressed();
        sources.spool_where(&std::env::temp_dir(), readers.iter(), is_zstd, &options)?;
        Ok(StateRows::of(sources, options))
    }

    /// Creates a reader of sources that need no preparation.
    pub(super) fn of(sources: SourceFiles<'a>, options: Options<'a>) -> StateRows<'a> {
        StateRows { sources, options, bytes: Vec::new(), scratch: Vec::new() }
    }

    /// The path of the checkpoint.
    pub(super) fn path(&self) -> &Path {
        &self.sources.checkpoint.path
    }

    /// Fills `out` with the elements of whole rows of a float tensor, exactly.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for an unknown tensor, and for rows that do not exist or do not fit `out`;
    /// [`Error::Malformed`], [`Error::Io`].
    pub fn read_rows_f64(&mut self, name: &str, rows: Range<usize>, out: &mut [f64]) -> Result<(), Error> {
        let checkpoint = self.sources.checkpoint;
        let tensor = tensor(checkpoint, name)?;
        floats::expect_convertible(&checkpoint.path, name, tensor.dtype)?;
        let row_count = tensor.shape.first().copied().unwrap_or(1);
        expect_rows(&checkpoint.path, name, &rows, usize::try_from(row_count).unwrap_or(usize::MAX))?;
        let row_len = tensor.len().checked_div(row_count).unwrap_or(0);
        expect_len(&checkpoint.path, name, "elements", rows.len() as u64 * row_len, out.len() as u64)?;
        let reader = TensorReader::new(name, tensor);
        // Elements that are scattered in the source are read at once, regardless of memory.
        let step = if reader.wants_large_pieces() { out.len() } else { CHUNK_ELEMENTS };
        let mut first = rows.start as u64 * row_len;
        for piece in out.chunks_mut(step.max(1)) {
            self.read(&reader, first..first + piece.len() as u64)?;
            floats::decode(tensor.dtype, &self.bytes, piece);
            first += piece.len() as u64;
        }
        Ok(())
    }

    /// Returns the only element of a tensor of `I64`, `I32`, `U64`, `U32` or a float dtype.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if the tensor has several elements or another dtype; those of reading.
    pub(super) fn read_number(&mut self, name: &str) -> Result<f64, Error> {
        let checkpoint = self.sources.checkpoint;
        let tensor = tensor(checkpoint, name)?;
        if tensor.len() != 1 {
            let reason = format!("`{name}` is not a number: it has the shape {:?}", tensor.shape);
            return Err(Error::bad_request(&checkpoint.path, reason));
        }
        self.read(&TensorReader::new(name, tensor), 0..1)?;
        let wide = |bytes: &[u8]| {
            let mut all = [0; 8];
            all[..bytes.len()].copy_from_slice(bytes);
            i64::from_le_bytes(all)
        };
        match tensor.dtype {
            #[expect(clippy::cast_precision_loss, reason = "no run does 2^53 steps")]
            TensorType::I64 | TensorType::U64 | TensorType::U32 => Ok(wide(&self.bytes) as f64),
            TensorType::I32 => Ok(f64::from(wide(&self.bytes) as i32)),
            dtype => {
                floats::expect_convertible(&checkpoint.path, name, dtype)?;
                let mut value = [0.0];
                floats::decode(dtype, &self.bytes, &mut value);
                Ok(value[0])
            }
        }
    }

    /// Verifies all bytes that were read against the checksums of the format.
    ///
    /// # Errors
    /// [`Error::Malformed`] for bytes that do not match, [`Error::Io`], [`Error::Canceled`].
    pub fn finish(self) -> Result<(), Error> {
        self.sources.complete_checks(&self.options)?;
        self.sources.checks.verify()
    }

    /// Reads elements of a tensor into the buffer.
    fn read(&mut self, reader: &TensorReader<'_>, elements: Range<u64>) -> Result<(), Error> {
        self.options.check_cancel()?;
        self.bytes.resize((elements.end - elements.start) as usize * reader.size(), 0);
        let scratch_max = scratch_bytes(PieceSizes::of(&self.options), reader);
        let mut reading = Reading { reader, sources: &self.sources, scratch: &mut self.scratch, scratch_max };
        reading.read(elements, &mut self.bytes).map(drop)
    }
}

impl Count {
    /// Returns the number of steps.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if it is not a single whole number of at least 0; those of reading.
    pub fn read(&self, rows: &mut StateRows<'_>) -> Result<u64, Error> {
        let steps = self.value.map_or_else(|| rows.read_number(&self.name), Ok)?;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is compared")]
        let rounded = steps as u64;
        if rounded as f64 == steps {
            return Ok(rounded);
        }
        let reason = format!("`{}` should count steps, but it is {steps}", self.name);
        Err(Error::bad_request(rows.path(), reason))
    }
}

fn tensor<'a>(checkpoint: &'a Checkpoint, name: &str) -> Result<&'a Tensor, Error> {
    let tensors = &checkpoint.tensors;
    tensors.get(name).ok_or_else(|| Error::unknown_tensor(&checkpoint.path, name, tensors.len()))
}
