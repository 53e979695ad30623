//! AdamW with one-byte moments, stored as in bitsandbytes and torchao: per block the largest magnitude, and per
//! element the code of its ratio to that magnitude ([`CodeBook`](crate::quantized::CodeBook)).
//!
//! A step decodes a block, applies [`AdamW`], and encodes the new moments; parameters are updated with the moments
//! before rounding. A block lies within a row. A shard holds whole rows and therefore whole blocks, so the bits of an
//! update do not depend on how a parameter is sharded. (The blocks of bitsandbytes are ranges of the flat parameter:
//! the same if the row length is a multiple of the block length.)

use fsdp_core::DType;
use fsdp_core::model::{ModelSpec, ParamId, ParamSpec};
use fsdp_core::update::{Piece, StateAxis, StatePiece, StateTensor};

use super::adamw::AdamW;

/// Elements per block; the last block of a row may be shorter.
const BLOCK: usize = 256;

/// Parameters with fewer elements keep full-precision moments, as in bitsandbytes.
const LEAST_LEN: usize = 4096;

/// So do parameters with shorter rows, or without rows: the magnitudes of their blocks would take more memory than
/// they save.
const LEAST_ROW: usize = 16;

/// [`AdamW`] with 8-bit moments. State: `exp_avg_codes` and `exp_avg_sq_codes` (bytes) with `exp_avg_absmax` and
/// `exp_avg_sq_absmax` (one per block), or `exp_avg` and `exp_avg_sq` for small parameters.
#[derive(Clone, Debug)]
pub struct AdamW8bit {
    /// The rule applied between decoding and encoding.
    pub adamw: AdamW,
    /// Per parameter, its row length if its moments are coded.
    row_lens: Vec<Option<usize>>,
}

impl AdamW8bit {
    /// Elements per block; the last block of a row may be shorter.
    pub const BLOCK: usize = BLOCK;

    /// Creates the rule for the parameters of a model.
    pub fn new(adamw: AdamW, spec: &ModelSpec) -> Self {
        let row_len = |param: &ParamSpec| {
            param.row_len().filter(|&row_len| row_len >= LEAST_ROW && param.len() >= LEAST_LEN)
        };
        Self { adamw, row_lens: spec.params.iter().map(row_len).collect() }
    }

    /// Row length of a parameter with 8-bit moments; `None` for other parameters.
    pub fn row_len(&self, param: ParamId) -> Option<usize> {
        self.row_lens[param.0]
    }

    pub(super) fn state(&self, pieces: &[Piece], dtype: DType) -> Vec<StateTensor> {
        let [mut full, mut codes, mut largest] = [const { Vec::new() }; 3];
        for piece in pieces {
            let (to, axis, first, len) = match self.row_len(piece.param) {
                None => (&mut full, StateAxis::Elements, piece.param_offset, piece.len),
                Some(row_len) => {
                    let [first, len] = [piece.param_offset, piece.len].map(|len| blocks(len, row_len));
                    append(&mut largest, piece.param, StateAxis::Blocks(BLOCK), first, len);
                    (&mut codes, StateAxis::Elements, piece.param_offset, piece.len)
                }
            };
            append(to, piece.param, axis, first, len);
        }
        let tensor = |name, dtype, pieces: &[StatePiece]| {
            let len = pieces.last().map_or(0, |piece| piece.offset + piece.len);
            StateTensor { name, len, dtype, pieces: pieces.to_vec() }
        };
        vec![
            tensor("exp_avg", dtype, &full),
            tensor("exp_avg_sq", dtype, &full),
            tensor("exp_avg_codes", DType::U8, &codes),
            tensor("exp_avg_sq_codes", DType::U8, &codes),
            tensor("exp_avg_absmax", dtype, &largest),
            tensor("exp_avg_sq_absmax", dtype, &largest),
        ]
    }
}

/// Number of blocks in `len` elements of whole rows.
pub(super) fn blocks(len: usize, row_len: usize) -> usize {
    len / row_len * row_len.div_ceil(BLOCK)
}

/// Appends values of a parameter to the pieces of a state tensor.
fn append(pieces: &mut Vec<StatePiece>, param: ParamId, axis: StateAxis, first: usize, len: usize) {
    let offset = pieces.last().map_or(0, |piece| piece.offset + piece.len);
    pieces.push(StatePiece { param, axis, offset, len, first });
}
