//! The rows of bytes of a quantized weight: encoded from its values, or joined from what bitsandbytes has saved.
//!
//! Scales of scales and their mean depend on the whole weight, so a rank reads all of a weight of which it has rows; what it
//! gets does not depend on which ranks have which.

use std::ops::Range;

use fsdp_ckpt::training::{ModelWeights, Nf4Weight};
use fsdp_core::model::ParamSpec;
use fsdp_nn::quantized::{CodeBook, Nested, Nf4, ScaleFormat, Scales, VALUES};
use rayon::prelude::*;

use super::stored_name;
use crate::error::TrainError;

/// Elements of a weight to read at a time.
const PART_ELEMS: usize = 1 << 20;

/// Reads elements of rows.
pub(crate) type ReadRows<'a> = dyn Fn(Range<usize>, &mut [f64]) -> Result<(), TrainError> + Sync + 'a;

/// A weight that is or will be quantized.
pub(crate) struct QuantizedWeight<'a> {
    matrix: Nf4,
    scales: Scales,
    codes: Codes<'a>,
}

/// Where the codes of elements are from.
enum Codes<'a> {
    /// Values to encode.
    Of(&'a ReadRows<'a>),
    /// A file.
    In(Nf4Weight<'a>),
}

impl<'a> QuantizedWeight<'a> {
    /// Prepares a weight: `read` has its values, which are in `files`, if they are not random.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`]; [`TrainError::Input`] for values that are not finite; [`TrainError::Misfit`] for a weight that
    /// bitsandbytes has quantized in another way than the run file says.
    pub(crate) fn new(
        param: &ParamSpec,
        matrix: Nf4,
        files: Option<&'a ModelWeights>,
        read: &'a ReadRows<'a>,
    ) -> Result<Self, TrainError> {
        if let Some(files) = files
            && let Some(weight) = files.nf4(stored_name(files, param))
        {
            let scales = saved_scales(param, matrix, &weight)?;
            return Ok(Self { matrix, scales, codes: Codes::In(weight) });
        }
        let rows = (PART_ELEMS / matrix.columns).max(1);
        let parts: Vec<usize> = (0..matrix.rows).step_by(rows).collect();
        let magnitudes = |first: usize| -> Result<Vec<f32>, TrainError> {
            let values = floats(matrix, read, first..matrix.rows.min(first + rows))?;
            Ok(Nf4::magnitudes(&values).collect())
        };
        let magnitudes: Vec<Vec<f32>> = parts.into_par_iter().map(magnitudes).collect::<Result<_, _>>()?;
        let magnitudes = magnitudes.concat();
        if let Some(block) = magnitudes.iter().position(|magnitude| !magnitude.is_finite()) {
            return Err(TrainError::Input(format!(
                "`{}` cannot be quantized: row {} has an element that is infinite or not a number",
                param.fqn,
                block / matrix.blocks()
            )));
        }
        Ok(Self { matrix, scales: Scales::new(matrix.scales, magnitudes), codes: Codes::Of(read) })
    }

    /// The bytes of rows.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`].
    pub(crate) fn bytes(&self, rows: Range<usize>) -> Result<Vec<u8>, TrainError> {
        let mut bytes = Vec::with_capacity(rows.len() * self.matrix.stored().row_bytes);
        match &self.codes {
            Codes::Of(read) => {
                let part = (PART_ELEMS / self.matrix.columns).max(1);
                for first in rows.clone().step_by(part) {
                    let values = floats(self.matrix, *read, first..rows.end.min(first + part))?;
                    for (row, values) in values.chunks(self.matrix.columns).enumerate() {
                        self.matrix.encode(&self.scales, first + row, values, &mut bytes);
                    }
                }
            }
            Codes::In(weight) => {
                let codes = weight.read_codes(rows.clone())?;
                for (row, codes) in rows.zip(codes.chunks(self.matrix.columns / 2)) {
                    self.matrix.join(&self.scales, row, codes, &mut bytes);
                }
            }
        }
        Ok(bytes)
    }

    /// The elements of rows, as they are decoded.
    ///
    /// # Errors
    /// As [`QuantizedWeight::bytes`].
    pub(crate) fn values(&self, rows: Range<usize>, values: &mut [f64]) -> Result<(), TrainError> {
        let (bytes, mut decoded) = (self.bytes(rows.clone())?, vec![0.0; self.matrix.columns]);
        let of_rows =
            bytes.chunks(self.matrix.stored().row_bytes).zip(values.chunks_mut(self.matrix.columns));
        for (row, (bytes, values)) in rows.zip(of_rows) {
            self.matrix.decode(row, bytes, &mut decoded);
            values.iter_mut().zip(&decoded).for_each(|(value, decoded)| *value = f64::from(*decoded));
        }
        Ok(())
    }
}

/// The values of rows; those that `f32` cannot represent are rounded.
fn floats(matrix: Nf4, read: &ReadRows<'_>, rows: Range<usize>) -> Result<Vec<f32>, TrainError> {
    let mut values = vec![0.0; rows.len() * matrix.columns];
    read(rows, &mut values)?;
    #[expect(clippy::cast_possible_truncation, reason = "weights are f32 at most, or drawn at random")]
    return Ok(values.into_iter().map(|value| value as f32).collect());
}

/// The scales that bitsandbytes has saved.
fn saved_scales(param: &ParamSpec, matrix: Nf4, weight: &Nf4Weight<'_>) -> Result<Scales, TrainError> {
    let differs = |what: &str, key: &'static str, to: &str| {
        let reason = format!("`{}` was saved by bitsandbytes {what}; set it to {to}", param.fqn);
        Err(TrainError::Misfit { key, reason })
    };
    const KEY: &str = "adapter.quantize";
    let saved = weight.scales()?;
    if weight.block() != fsdp_nn::quantized::BLOCK || saved.values != VALUES {
        let what = format!(
            "in {} of {} elements, which are decoded but not kept as they are",
            if saved.values == VALUES { "blocks" } else { "another 4-bit type, in blocks" },
            weight.block()
        );
        return differs(&what, KEY, "\"none\"");
    }
    match (matrix.scales, saved.nested) {
        (ScaleFormat::Single, None) => Ok(Scales::Single(saved.absmax)),
        (ScaleFormat::Nested, Some(nested)) => {
            if nested.values != CodeBook::signed().values {
                return differs("with other codes of scales than its own", KEY, "\"none\"");
            }
            Ok(Scales::Nested(Nested { codes: nested.codes, scales: nested.absmax, offset: nested.offset }))
        }
        (ScaleFormat::Single, Some(_)) => differs("with double quantization", KEY, "\"nf4\""),
        (ScaleFormat::Nested, None) => differs("without double quantization", KEY, "\"nf4-single\""),
    }
}
