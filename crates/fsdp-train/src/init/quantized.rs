//! The rows of bytes of a quantized weight: encoded from its values, or joined from what files hold in 4 bits.
//!
//! Scales of scales and their mean depend on the whole weight, so a rank reads all of a weight of which it has rows; what it
//! gets does not depend on which ranks have which.

use std::ops::Range;

use fsdp_ckpt::training::{ModelWeights, Nf4Weight};
use fsdp_core::model::ParamSpec;
use fsdp_nn::backend::Orientation;
use fsdp_nn::layer::PackedWeight;
use fsdp_nn::quantized::{BLOCK, CodeBook, Format, NESTED_BLOCK, Nested, Packed, Scales, VALUES};
use rayon::prelude::*;

use super::stored_name;
use crate::error::TrainError;

/// Elements of a weight to read at a time.
const PART_ELEMS: usize = 1 << 20;

/// Reads elements of rows.
pub(crate) type ReadRows<'a> = dyn Fn(Range<usize>, &mut [f64]) -> Result<(), TrainError> + Sync + 'a;

/// A weight that is or will be quantized.
pub(crate) struct QuantizedWeight<'a> {
    matrix: Packed,
    /// The order of the parameter as floats.
    orientation: Orientation,
    scales: Scales,
    codes: Codes<'a>,
}

/// Where the codes of elements are from.
enum Codes<'a> {
    /// Values to encode, in the order of the parameter.
    Of(&'a ReadRows<'a>),
    /// A file of bitsandbytes.
    In(Nf4Weight<'a>),
    /// The codes of all rows.
    All(Vec<u8>),
}

impl<'a> QuantizedWeight<'a> {
    /// Prepares a weight: `read` has its values, which are in `files`, if they are not random.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`]; [`TrainError::Input`] for values that are not finite; [`TrainError::Misfit`] for a weight that
    /// bitsandbytes has quantized in another way than the run file says.
    pub(crate) fn new(
        param: &ParamSpec,
        PackedWeight { matrix, orientation }: PackedWeight,
        files: Option<&'a ModelWeights>,
        read: &'a ReadRows<'a>,
    ) -> Result<Self, TrainError> {
        if let Some(files) = files {
            let name = stored_name(files, param);
            if let Some(weight) = files.nf4(name) {
                let scales = saved_scales(param, matrix, &weight)?;
                return Ok(Self { matrix, orientation, scales, codes: Codes::In(weight) });
            }
            if let Some(weight) = files.mxfp4(name).filter(|_| matrix.format == Format::Mxfp4) {
                let [codes, scales] = weight.read()?;
                let (scales, codes) = (Scales::Exponents(scales), Codes::All(codes));
                return Ok(Self { matrix, orientation, scales, codes });
            }
        }
        let rows = part_rows(matrix, orientation);
        let parts: Vec<usize> = (0..matrix.rows).step_by(rows).collect();
        let magnitudes = |first: usize| -> Result<Vec<f32>, TrainError> {
            let values = floats(matrix, read, orientation, first..matrix.rows.min(first + rows))?;
            Ok(matrix.format.magnitudes(&values).collect())
        };
        let magnitudes: Vec<Vec<f32>> = parts.into_par_iter().map(magnitudes).collect::<Result<_, _>>()?;
        let magnitudes = magnitudes.concat();
        if let Some(block) = magnitudes.iter().position(|magnitude| !magnitude.is_finite()) {
            return Err(TrainError::Input(format!(
                "`{}` cannot be quantized: output {} has an element that is infinite or not a number",
                param.fqn,
                block / matrix.blocks()
            )));
        }
        let scales = Scales::new(matrix.format, magnitudes);
        Ok(Self { matrix, orientation, scales, codes: Codes::Of(read) })
    }

    /// The bytes of rows.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`].
    pub(crate) fn bytes(&self, rows: Range<usize>) -> Result<Vec<u8>, TrainError> {
        let mut bytes = Vec::with_capacity(rows.len() * self.matrix.stored().row_bytes);
        match &self.codes {
            Codes::Of(read) => {
                let part = part_rows(self.matrix, self.orientation);
                for first in rows.clone().step_by(part) {
                    let values =
                        floats(self.matrix, *read, self.orientation, first..rows.end.min(first + part))?;
                    for (row, values) in values.chunks(self.matrix.columns).enumerate() {
                        self.matrix.encode(&self.scales, first + row, values, &mut bytes);
                    }
                }
            }
            Codes::In(weight) => self.join(rows.clone(), &weight.read_codes(rows)?, &mut bytes),
            Codes::All(codes) => {
                let row_codes = self.matrix.columns / 2;
                let of_rows = rows.start * row_codes..rows.end * row_codes;
                self.join(rows, &codes[of_rows], &mut bytes);
            }
        }
        Ok(bytes)
    }

    fn join(&self, rows: Range<usize>, codes: &[u8], bytes: &mut Vec<u8>) {
        for (row, codes) in rows.zip(codes.chunks(self.matrix.columns / 2)) {
            self.matrix.join(&self.scales, row, codes, bytes);
        }
    }

    /// The elements of rows of the parameter, as they are decoded.
    ///
    /// # Errors
    /// As [`QuantizedWeight::bytes`].
    pub(crate) fn values(&self, rows: Range<usize>, values: &mut [f64]) -> Result<(), TrainError> {
        let Packed { rows: outputs, columns, .. } = self.matrix;
        if self.orientation == Orientation::OutIn {
            return self.decode(rows, |row, decoded| {
                let of_row = &mut values[row * columns..][..columns];
                of_row.iter_mut().zip(decoded).for_each(|(value, &decoded)| *value = f64::from(decoded));
            });
        }
        self.decode(0..outputs, |output, decoded| {
            let of_output = values[output..].iter_mut().step_by(outputs);
            of_output.zip(&decoded[rows.clone()]).for_each(|(value, &decoded)| *value = f64::from(decoded));
        })
    }

    /// Decodes rows of the matrix, each with its number among them.
    fn decode(&self, rows: Range<usize>, mut decoded: impl FnMut(usize, &[f32])) -> Result<(), TrainError> {
        let (bytes, mut elements) = (self.bytes(rows.clone())?, vec![0.0; self.matrix.columns]);
        for (row, bytes) in bytes.chunks(self.matrix.stored().row_bytes).enumerate() {
            self.matrix.decode(rows.start + row, bytes, &mut elements);
            decoded(row, &elements);
        }
        Ok(())
    }
}

/// Rows (outputs) to read at a time: all of them, if each is spread over the whole parameter.
fn part_rows(matrix: Packed, orientation: Orientation) -> usize {
    match orientation {
        Orientation::OutIn => (PART_ELEMS / matrix.columns).max(1),
        Orientation::InOut => matrix.rows,
    }
}

/// The values of rows (outputs); those that `f32` cannot represent are rounded.
fn floats(
    matrix: Packed,
    read: &ReadRows<'_>,
    orientation: Orientation,
    rows: Range<usize>,
) -> Result<Vec<f32>, TrainError> {
    #[expect(clippy::cast_possible_truncation, reason = "weights are f32 at most, or drawn at random")]
    let round = |value: f64| value as f32;
    if orientation == Orientation::OutIn {
        let mut values = vec![0.0; rows.len() * matrix.columns];
        read(rows, &mut values)?;
        return Ok(values.into_iter().map(round).collect());
    }
    let mut floats = vec![0.0; rows.len() * matrix.columns];
    let mut values = vec![0.0; (PART_ELEMS / matrix.rows).max(1) * matrix.rows];
    for first in (0..matrix.columns).step_by(values.len() / matrix.rows) {
        let inputs = first..matrix.columns.min(first + values.len() / matrix.rows);
        let values = &mut values[..inputs.len() * matrix.rows];
        read(inputs.clone(), values)?;
        for (input, values) in inputs.zip(values.chunks(matrix.rows)) {
            let of_rows = values[rows.clone()].iter().zip(floats[input..].iter_mut().step_by(matrix.columns));
            of_rows.for_each(|(value, float)| *float = round(*value));
        }
    }
    Ok(floats)
}

/// The scales that bitsandbytes has saved.
fn saved_scales(param: &ParamSpec, matrix: Packed, weight: &Nf4Weight<'_>) -> Result<Scales, TrainError> {
    let differs = |what: &str, key: &'static str, to: &str| {
        let reason = format!("`{}` was saved by bitsandbytes {what}; set it to {to}", param.fqn);
        Err(TrainError::Misfit { key, reason })
    };
    const KEY: &str = "adapter.quantize";
    let saved = weight.scales()?;
    if weight.block() != BLOCK || saved.values != VALUES {
        let what = format!(
            "in {} of {} elements, which are decoded but not kept as they are",
            if saved.values == VALUES { "blocks" } else { "another 4-bit type, in blocks" },
            weight.block()
        );
        return differs(&what, KEY, "\"none\"");
    }
    match (matrix.format, saved.nested) {
        (Format::Nf4Single, None) => Ok(Scales::Single(saved.absmax)),
        (Format::Nf4, Some(nested)) => {
            if nested.block != NESTED_BLOCK || nested.values != CodeBook::signed().values {
                return differs("with scales in other codes or blocks than usual", KEY, "\"none\"");
            }
            Ok(Scales::Nested(Nested { codes: nested.codes, scales: nested.absmax, offset: nested.offset }))
        }
        (_, Some(_)) => differs("with double quantization", KEY, "\"nf4\""),
        (_, None) => differs("without double quantization", KEY, "\"nf4-single\""),
    }
}
