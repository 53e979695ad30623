//! Weights of experts in MXFP4, as gpt-oss is published: 4-bit floats in blocks of 32, each with a power of two (Open Compute
//! Project, Microscaling Formats 1.0).
//!
//! For a stack of weights `inputs x outputs`, a file has `.._blocks` of shape `[experts, outputs, inputs / 32, 16]`, two
//! elements per byte, the lower four bits first, and `.._scales` of shape `[experts, outputs, inputs / 32]`, exponents
//! with a bias of 127. Every value is exact in bf16.

use std::{collections::BTreeMap, ops::Range};

use crate::{
    checkpoint::weights_of_stack,
    error::Error,
    model_files::ModelReader,
    rows::{expect_len, expect_rows},
    safetensors::TensorType,
};

/// The 4-bit floats: a sign, two bits of exponent and one of mantissa.
const FLOATS: [f64; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Elements per block.
const BLOCK: usize = 32;

/// A weight in MXFP4.
#[derive(Clone, Copy, Debug)]
pub struct Mxfp4Weight<'a> {
    model: &'a ModelReader,
    name: &'a str,
    weight: &'a Weight,
}

/// The weights of experts in MXFP4 of a model, one by one.
#[derive(Debug)]
pub(super) struct Mxfp4 {
    model: ModelReader,
    weights: BTreeMap<String, Weight>,
}

/// One weight of one expert.
#[derive(Debug)]
struct Weight {
    stack: String,
    expert: usize,
    blocks: usize,
    outputs: usize,
}

impl Mxfp4 {
    /// Finds the stacks of a model that are in MXFP4; `None` if there are none.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for blocks and scales that do not belong together.
    pub(super) fn of(model: ModelReader) -> Result<Option<Self>, Error> {
        let mut weights = BTreeMap::new();
        let stacks: Vec<String> =
            model.names().filter_map(|name| name.strip_suffix("_blocks").map(str::to_owned)).collect();
        for stack in stacks {
            let [blocks, scales] = names(&stack);
            let entry = model.entry(&blocks)?;
            let found = model.entry(&scales).map(|scales| (scales.dtype(), scales.shape().to_vec())).ok();
            let (TensorType::U8, &[experts, outputs, count, 16]) = (entry.dtype(), entry.shape()) else {
                return Err(mismatch(&model, &stack));
            };
            if found != Some((TensorType::U8, vec![experts, outputs, count])) {
                return Err(mismatch(&model, &stack));
            }
            let Some(each) = weights_of_stack(&stack, experts as u64) else {
                return Err(mismatch(&model, &stack));
            };
            for (name, expert) in each {
                let weight = Weight { stack: stack.clone(), expert: expert as usize, blocks: count, outputs };
                weights.insert(name, weight);
            }
        }
        Ok((!weights.is_empty()).then_some(Self { model, weights }))
    }

    /// Whether a tensor of the files holds blocks or scales.
    pub(super) fn has_part(&self, tensor: &str) -> bool {
        let stack = tensor.strip_suffix("_blocks").or_else(|| tensor.strip_suffix("_scales"));
        stack.is_some_and(|stack| self.weights.values().any(|weight| weight.stack == stack))
    }

    /// The names of all weights.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.weights.keys().map(String::as_str)
    }

    /// The shape of a weight, `inputs x outputs`; `None` if there is no such weight.
    pub(super) fn shape(&self, name: &str) -> Option<[usize; 2]> {
        self.weights.get(name).map(|weight| [weight.blocks * BLOCK, weight.outputs])
    }

    /// A weight; `None` if there is no such weight.
    pub(super) fn weight(&self, name: &str) -> Option<Mxfp4Weight<'_>> {
        let (name, weight) = self.weights.get_key_value(name)?;
        Some(Mxfp4Weight { model: &self.model, name, weight })
    }
}

impl Mxfp4Weight<'_> {
    /// Blocks and scales of all outputs: 16 bytes and 1 byte per block, output by output.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn read(&self) -> Result<[Vec<u8>; 2], Error> {
        let &Weight { ref stack, expert, blocks: count, outputs } = self.weight;
        let (mut blocks, mut scales) = (vec![0; outputs * count * 16], vec![0; outputs * count]);
        let [of_blocks, of_scales] = names(stack);
        self.model.read_rows(&of_blocks, expert..expert + 1, &mut blocks)?;
        self.model.read_rows(&of_scales, expert..expert + 1, &mut scales)?;
        Ok([blocks, scales])
    }

    /// Fills `out` with the elements of rows (inputs), exactly. Reads the whole expert.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if the rows do not exist or do not match the length of `out`; [`Error::Io`].
    pub(super) fn read_rows_f64(&self, rows: Range<usize>, out: &mut [f64]) -> Result<(), Error> {
        let &Weight { blocks: count, outputs, .. } = self.weight;
        expect_rows(self.model.path(), self.name, &rows, count * BLOCK)?;
        let expected = (rows.len() * outputs) as u64;
        expect_len(self.model.path(), self.name, "elements", expected, out.len() as u64)?;
        let [blocks, scales] = self.read()?;
        for (output, (blocks, scales)) in blocks.chunks(count * 16).zip(scales.chunks(count)).enumerate() {
            for (row, out) in rows.clone().zip(out[output..].iter_mut().step_by(outputs)) {
                let byte = blocks[row / 2];
                let code = if row % 2 == 0 { byte & 0xf } else { byte >> 4 };
                *out = FLOATS[usize::from(code)] * power(scales[row / BLOCK]);
            }
        }
        Ok(())
    }
}

fn names(stack: &str) -> [String; 2] {
    ["blocks", "scales"].map(|part| format!("{stack}_{part}"))
}

/// The power of two of a block; not a number for the code that says so.
fn power(scale: u8) -> f64 {
    if scale == u8::MAX { f64::NAN } else { (f64::from(scale) - 127.0).exp2() }
}

fn mismatch(model: &ModelReader, stack: &str) -> Error {
    let reason = format!(
        "`{stack}_blocks` and `{stack}_scales` are not experts in MXFP4: U8 of shapes [experts, outputs, blocks, 16] and \
         [experts, outputs, blocks]"
    );
    Error::bad_request(model.path(), reason)
}
