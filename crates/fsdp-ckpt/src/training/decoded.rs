//! Weights that files hold in 4 bits, read as floats.

use std::ops::Range;

use super::{
    bitsandbytes::{Bitsandbytes, Nf4Weight},
    mxfp4::{Mxfp4, Mxfp4Weight},
};
use crate::{error::Error, model_files::ModelReader};

const KNOWN: &str = "the caller knows its shape";

/// The weights in 4 bits of a model.
#[derive(Debug)]
pub(super) enum Decoded {
    /// Experts in MXFP4.
    Mxfp4(Mxfp4),
    /// Linear maps in NF4 or FP4.
    Bitsandbytes(Bitsandbytes),
}

impl Decoded {
    /// Finds the weights of a model that are in 4 bits; `None` if there are none.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for tensors that do not belong together.
    pub(super) fn of(model: ModelReader) -> Result<Option<Self>, Error> {
        match Bitsandbytes::is_in(&model) {
            true => Ok(Bitsandbytes::of(model)?.map(Decoded::Bitsandbytes)),
            false => Ok(Mxfp4::of(model)?.map(Decoded::Mxfp4)),
        }
    }

    /// Whether a tensor of the files is a part of a weight.
    pub(super) fn has_part(&self, tensor: &str) -> bool {
        match self {
            Decoded::Mxfp4(weights) => weights.has_part(tensor),
            Decoded::Bitsandbytes(weights) => weights.has_part(tensor),
        }
    }

    /// The names of all weights.
    pub(super) fn names(&self) -> Vec<&str> {
        match self {
            Decoded::Mxfp4(weights) => weights.names().collect(),
            Decoded::Bitsandbytes(weights) => weights.names().collect(),
        }
    }

    /// The shape of a weight; `None` if there is no such weight.
    pub(super) fn shape(&self, name: &str) -> Option<[usize; 2]> {
        match self {
            Decoded::Mxfp4(weights) => weights.shape(name),
            Decoded::Bitsandbytes(weights) => weights.shape(name),
        }
    }

    /// An expert's weight in MXFP4; `None` if there is no such weight.
    pub(super) fn mxfp4(&self, name: &str) -> Option<Mxfp4Weight<'_>> {
        match self {
            Decoded::Mxfp4(weights) => weights.weight(name),
            Decoded::Bitsandbytes(_) => None,
        }
    }

    /// A weight as bitsandbytes saved it; `None` if there is no such weight.
    pub(super) fn nf4(&self, name: &str) -> Option<Nf4Weight<'_>> {
        match self {
            Decoded::Mxfp4(_) => None,
            Decoded::Bitsandbytes(weights) => weights.weight(name),
        }
    }

    /// Fills `out` with the elements of rows of a weight.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if the rows do not exist or do not match the length of `out`; [`Error::Io`].
    ///
    /// # Panics
    /// For an unknown weight.
    pub(super) fn read_rows_f64(&self, name: &str, rows: Range<usize>, out: &mut [f64]) -> Result<(), Error> {
        match self {
            Decoded::Mxfp4(weights) => weights.weight(name).expect(KNOWN).read_rows_f64(rows, out),
            Decoded::Bitsandbytes(weights) => weights.weight(name).expect(KNOWN).read_rows_f64(rows, out),
        }
    }
}
