//! Weights in 4 bits as bitsandbytes saves them, in NF4 or FP4.
//!
//! For a weight `outputs x inputs`, a file has `weight`, two codes per byte, the upper four bits first; `weight.absmax`,
//! the scale of each block of elements, counted through the whole weight; `weight.quant_map`, the 16 numbers that codes stand for;
//! and `weight.quant_state.bitsandbytes__nf4` (or `fp4`), JSON as bytes with shape and block size. With double
//! quantization, scales are codes as well: of the numbers `weight.nested_quant_map`, times the scale of a block of
//! scales, `weight.nested_absmax`, plus `nested_offset`.

use std::{collections::BTreeMap, ops::Range};

use serde::Deserialize;

use crate::{
    error::Error,
    model_files::ModelReader,
    rows::{expect_len, expect_rows},
    safetensors::TensorType,
};

/// What the name of a weight's description ends with, without the type of its numbers.
const STATE: &str = ".quant_state.bitsandbytes__";

/// The last parts of the names of a weight's other tensors.
const PARTS: [&str; 4] = ["absmax", "quant_map", "nested_absmax", "nested_quant_map"];

/// The most bytes that a weight's description may have.
const STATE_BYTES_MAX: usize = 4096;

/// The weights of a model in 4 bits.
#[derive(Debug)]
pub(super) struct Bitsandbytes {
    model: ModelReader,
    weights: BTreeMap<String, State>,
}

/// The description of a weight.
#[derive(Debug, Deserialize)]
struct State {
    shape: [usize; 2],
    blocksize: usize,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f64>,
}

/// A weight in 4 bits.
#[derive(Clone, Copy, Debug)]
pub struct Nf4Weight<'a> {
    model: &'a ModelReader,
    name: &'a str,
    state: &'a State,
}

/// The scales of a weight in 4 bits.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedScales {
    /// The numbers that codes of elements stand for.
    pub values: Vec<f32>,
    /// The scale of each block, if scales are not codes.
    pub absmax: Vec<f32>,
    /// The codes of scales, if they are.
    pub nested: Option<SavedNested>,
}

/// Scales as codes.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedNested {
    /// The numbers that codes of scales stand for.
    pub values: Vec<f32>,
    /// The code of each block's scale.
    pub codes: Vec<u8>,
    /// Scales with a common scale.
    pub block: usize,
    /// The scale of each block of scales.
    pub absmax: Vec<f32>,
    /// What is added to all scales.
    pub offset: f32,
}

impl Bitsandbytes {
    /// Whether a model has weights in 4 bits.
    pub(super) fn is_in(model: &ModelReader) -> bool {
        model.names().any(|name| name.contains(STATE))
    }

    /// Finds the weights of a model that are in 4 bits; `None` if there are none.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for tensors that do not belong together.
    pub(super) fn of(model: ModelReader) -> Result<Option<Self>, Error> {
        let mut weights = BTreeMap::new();
        for name in model.names() {
            let Some(at) = name.find(STATE) else { continue };
            let mut text = vec![0; model.entry(name)?.shape().iter().product::<usize>().min(STATE_BYTES_MAX)];
            model.read_rows(name, 0..text.len(), &mut text)?;
            let weight = &name[..at];
            let state: State = serde_json::from_slice(&text).map_err(|error| {
                Error::bad_request(model.path(), format!("`{name}` does not describe a matrix: {error}"))
            })?;
            expect_parts(&model, weight, &state)?;
            weights.insert(weight.to_owned(), state);
        }
        Ok((!weights.is_empty()).then_some(Self { model, weights }))
    }

    /// Whether a tensor of the files is a part of a weight.
    pub(super) fn has_part(&self, tensor: &str) -> bool {
        let of_weight = |name: &str| self.weights.contains_key(name);
        of_weight(tensor)
            || tensor.find(STATE).is_some_and(|at| of_weight(&tensor[..at]))
            || tensor.rsplit_once('.').is_some_and(|(name, part)| PARTS.contains(&part) && of_weight(name))
    }

    /// The names of all weights.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.weights.keys().map(String::as_str)
    }

    /// The shape of a weight, `outputs x inputs`; `None` if there is no such weight.
    pub(super) fn shape(&self, name: &str) -> Option<[usize; 2]> {
        self.weights.get(name).map(|state| state.shape)
    }

    /// A weight; `None` if there is no such weight.
    pub(super) fn weight(&self, name: &str) -> Option<Nf4Weight<'_>> {
        let (name, state) = self.weights.get_key_value(name)?;
        Some(Nf4Weight { model: &self.model, name, state })
    }
}

impl Nf4Weight<'_> {
    /// Elements with a common scale.
    pub fn block(&self) -> usize {
        self.state.blocksize
    }

    /// The scales of all blocks.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn scales(&self) -> Result<SavedScales, Error> {
        let elements = self.state.shape.iter().product::<usize>();
        self.scales_of(0..elements.div_ceil(self.state.blocksize))
    }

    /// The codes of the elements of rows, two per byte, the upper four bits first.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for rows that do not exist; [`Error::Io`].
    pub fn read_codes(&self, rows: Range<usize>) -> Result<Vec<u8>, Error> {
        let [outputs, inputs] = self.state.shape;
        expect_rows(self.model.path(), self.name, &rows, outputs)?;
        let mut codes = vec![0; rows.len() * inputs / 2];
        // Bytes may be stored as elements of a larger type (bnb_4bit_quant_storage).
        let size = self.model.entry(self.name)?.dtype().size_bytes();
        let (start, end) = (rows.start * inputs / 2, rows.end * inputs / 2);
        let (first, last) = (start / size, end.div_ceil(size));
        let mut bytes = vec![0; (last - first) * size];
        self.model.read_rows(self.name, first..last, &mut bytes)?;
        codes.copy_from_slice(&bytes[start - first * size..][..end - start]);
        Ok(codes)
    }

    /// Fills `out` with the elements of rows, as bitsandbytes decodes them in `f32`.
    ///
    /// # Errors
    /// As [`Nf4Weight::read_codes`].
    pub(super) fn read_rows_f64(&self, rows: Range<usize>, out: &mut [f64]) -> Result<(), Error> {
        let (inputs, block) = (self.state.shape[1], self.state.blocksize);
        let expected = (rows.len() * inputs) as u64;
        expect_len(self.model.path(), self.name, "elements", expected, out.len() as u64)?;
        let codes = self.read_codes(rows.clone())?;
        let elements = rows.start * inputs..rows.end * inputs;
        let blocks = elements.start / block..elements.end.div_ceil(block);
        let scales = self.scales_of(blocks.clone())?;
        for ((element, out), index) in elements.zip(out).zip(0..) {
            let codes: u8 = codes[index / 2];
            let code = if index % 2 == 0 { codes >> 4 } else { codes & 0xf };
            let scale = scales.of_block(element / block - blocks.start, blocks.start);
            *out = f64::from(scales.values[usize::from(code)] * scale);
        }
        Ok(())
    }

    /// The scales of some blocks; those of blocks of scales are of all that these blocks are in.
    fn scales_of(&self, blocks: Range<usize>) -> Result<SavedScales, Error> {
        let values = self.floats("quant_map", 0..16)?;
        let Some((block, offset)) = self.state.nested() else {
            return Ok(SavedScales { values, absmax: self.floats("absmax", blocks)?, nested: None });
        };
        let mut codes = vec![0; blocks.len()];
        self.model.read_rows(&format!("{}.absmax", self.name), blocks.clone(), &mut codes)?;
        let absmax = self.floats("nested_absmax", blocks.start / block..blocks.end.div_ceil(block))?;
        let nested =
            SavedNested { values: self.floats("nested_quant_map", 0..256)?, codes, block, absmax, offset };
        Ok(SavedScales { values, absmax: Vec::new(), nested: Some(nested) })
    }

    fn floats(&self, part: &str, elements: Range<usize>) -> Result<Vec<f32>, Error> {
        let mut bytes = vec![0; 4 * elements.len()];
        self.model.read_rows(&format!("{}.{part}", self.name), elements, &mut bytes)?;
        let float = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        Ok(bytes.chunks_exact(4).map(float).collect())
    }
}

impl SavedScales {
    /// The scale of a block, with its index among these, the first of which is block `first` of the weight.
    fn of_block(&self, index: usize, first: usize) -> f32 {
        let Some(nested) = &self.nested else { return self.absmax[index] };
        let scale = nested.absmax[(first + index) / nested.block - first / nested.block];
        nested.values[usize::from(nested.codes[index])] * scale + nested.offset
    }
}

impl State {
    /// Block size and offset of scales that are codes.
    fn nested(&self) -> Option<(usize, f32)> {
        #[expect(clippy::cast_possible_truncation, reason = "an f32 that was written as JSON")]
        return Some((self.nested_blocksize?, self.nested_offset? as f32));
    }
}

/// Checks that a weight has all its parts, in the sizes that its description says.
fn expect_parts(model: &ModelReader, weight: &str, state: &State) -> Result<(), Error> {
    let &State { shape: [outputs, inputs], blocksize, .. } = state;
    let fail = |why: String| Err(Error::bad_request(model.path(), format!("`{weight}` in 4 bits {why}")));
    let Some(elements) = outputs.checked_mul(inputs).filter(|&elements| elements > 0 && inputs % 2 == 0)
    else {
        return fail(format!(
            "has the shape {outputs} x {inputs}; rows of an even number of elements can be read"
        ));
    };
    if blocksize == 0 || state.nested_blocksize == Some(0) {
        return fail("has blocks of no elements".into());
    }
    let stored = model.entry(weight)?;
    let bytes = stored.shape().iter().product::<usize>() * stored.dtype().size_bytes();
    if bytes != elements / 2 {
        return fail(format!("has {bytes} bytes; {outputs} x {inputs} elements have {}", elements / 2));
    }
    let blocks = elements.div_ceil(blocksize);
    let mut expected = vec![("quant_map", TensorType::F32, 16)];
    match state.nested() {
        None => expected.push(("absmax", TensorType::F32, blocks)),
        Some((block, _)) => expected.extend([
            ("absmax", TensorType::U8, blocks),
            ("nested_absmax", TensorType::F32, blocks.div_ceil(block)),
            ("nested_quant_map", TensorType::F32, 256),
        ]),
    }
    for (part, dtype, len) in expected {
        let entry = model.entry(&format!("{weight}.{part}"))?;
        if (entry.dtype(), entry.shape()) != (dtype, &[len]) {
            let (got, shape) = (entry.dtype(), entry.shape());
            return fail(format!(
                "has `{part}` as {got} of shape {shape:?}; {dtype} of shape [{len}] was expected"
            ));
        }
    }
    Ok(())
}
