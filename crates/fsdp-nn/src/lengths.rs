//! Checks of the arguments of operations, the same for memory that computes and memory that only counts. Arguments that do
//! not fit are bugs of ours, so they are panics that name what differs.

use fsdp_core::memory::{Category, HostSlice, HostSliceMut};
use fsdp_core::scalars::{GradientFactors, SCALAR_WORDS};
use fsdp_core::{DType, Error, ExactSum};

use crate::backend::{AttentionDims, Dropout, HeadDims, LinearDims};

/// That a length is as expected.
///
/// # Panics
/// When it is not; and so all checks of this file.
#[track_caller]
pub fn expect(what: &'static str, got: usize, expected: usize) -> Result<(), Error> {
    assert_eq!(got, expected, "{what}: {got}, but {expected} are needed");
    Ok(())
}

/// That `total` is a whole number of rows of `row_len`.
#[track_caller]
pub fn expect_rows(what: &'static str, row_len: usize, total: usize) -> Result<(), Error> {
    assert!(row_len > 0 && total.is_multiple_of(row_len), "{what}: {total} is not a multiple of {row_len}");
    Ok(())
}

/// Lengths of a sum of squares by rows, into an exact sum.
pub fn square_sum(src: usize, row_len: usize, words: usize) -> Result<(), Error> {
    expect_rows("elements of the rows of a square sum", row_len, src)?;
    expect("words of an exact sum", words, ExactSum::WORDS)
}

/// Lengths of a step's scalars and of the factors derived from them.
pub fn gradient_factors(scalars: usize, factors: usize) -> Result<(), Error> {
    expect("words of a step's scalars", scalars, SCALAR_WORDS)?;
    expect("gradient factors", factors, GradientFactors::LEN)
}

/// That several lengths are equal to the first.
pub fn expect_equal(what: &'static str, lens: &[usize]) -> Result<(), Error> {
    lens.iter().try_for_each(|&len| expect(what, len, lens[0]))
}

/// A dtype is not a float.
#[track_caller]
pub fn not_a_float(dtype: DType) -> Error {
    panic!("this needs a float dtype, not {dtype}")
}

/// A buffer has the wrong dtype.
#[track_caller]
pub fn wrong_dtype(category: Category, expected: DType, got: DType) -> Error {
    panic!("a buffer of {got} for {category} is used where the other operands need {expected}")
}

/// Lengths of the operands of a linear map: `x` and the weight where they take part, and the strided side.
pub fn linear(
    dims: LinearDims,
    x: Option<usize>,
    weight: Option<usize>,
    bias: Option<usize>,
    y: usize,
) -> Result<(), Error> {
    if let Some(x) = x {
        expect("elements of the input of a linear map", x, dims.rows * dims.inputs)?;
    }
    if let Some(weight) = weight {
        expect("elements of the weight of a linear map", weight, dims.inputs * dims.outputs)?;
    }
    if let Some(bias) = bias {
        expect("elements of the bias of a linear map", bias, dims.outputs)?;
    }
    let needed = dims.rows.saturating_sub(1) * dims.y_stride + dims.outputs;
    let is_enough = dims.y_stride >= dims.outputs && y >= needed;
    assert!(is_enough, "elements of the output of a linear map: {y}, but {needed} are needed at least");
    Ok(())
}

/// Lengths of an embedding: ids and their rows, and the table.
pub fn embedding(width: usize, ids: usize, table: usize, y: usize) -> Result<(), Error> {
    expect_rows("elements of an embedding table", width, table)?;
    expect("elements of embedded rows", y, ids * width)
}

/// Lengths of a norm over rows: tensors of the rows, vectors of one row, and statistics of `per_row`.
pub fn norm(
    width: usize,
    rows: &[usize],
    vectors: &[usize],
    statistics: usize,
    per_row: usize,
) -> Result<(), Error> {
    expect_rows("elements of a norm", width, rows[0])?;
    expect_equal("elements of the tensors of a norm", rows)?;
    vectors.iter().try_for_each(|&len| expect("elements of the weights of a norm", len, width))?;
    expect("statistics of a norm", statistics, rows[0] / width * per_row)
}

/// Lengths of attention: packed tensors, tensors of the output, and the log-sum-exp.
pub fn attention(
    dims: AttentionDims,
    dropout: Option<Dropout<'_>>,
    packed: &[usize],
    outputs: &[usize],
    lse: Option<usize>,
) -> Result<(), Error> {
    let is_even = dims.kv_heads > 0 && dims.heads.is_multiple_of(dims.kv_heads);
    assert!(is_even, "{} query heads do not share {} key heads evenly", dims.heads, dims.kv_heads);
    let (rows, width) = (dims.rows(), dims.heads * dims.head_dim);
    packed.iter().try_for_each(|&len| expect("elements of packed projections", len, rows * dims.packed()))?;
    outputs.iter().try_for_each(|&len| expect("elements of the output of attention", len, rows * width))?;
    if let Some(lse) = lse {
        expect("log-sum-exps of attention", lse, rows * dims.heads)?;
    }
    if let Some(dropout) = dropout {
        expect("dropout keys of attention", dropout.keys.len(), dims.batch)?;
    }
    Ok(())
}

/// Lengths of the logits and their loss.
pub fn head(
    dims: HeadDims,
    x: usize,
    weight: usize,
    targets: Option<(usize, usize)>,
    logits: usize,
    gradients: Option<(usize, Option<usize>)>,
) -> Result<(), Error> {
    expect("elements of the hidden states of a head", x, dims.rows * dims.hidden)?;
    expect("elements of the weight of a head", weight, dims.vocab * dims.hidden)?;
    let mut logit_rows = dims.rows;
    if let Some((targets, losses)) = targets {
        expect("targets of a head", targets, dims.rows)?;
        expect("losses of a head", losses, dims.rows)?;
        logit_rows = dims.chunk_rows.clamp(1, dims.rows.max(1));
    }
    let needed = logit_rows * dims.vocab;
    assert!(logits >= needed, "room for {logits} logits, but {needed} are needed");
    if let Some((dx, dweight)) = gradients {
        expect("elements of the gradient of hidden states", dx, x)?;
        dweight.map_or(Ok(()), |len| expect("elements of the gradient of a head", len, weight))?;
    }
    Ok(())
}

/// That dropout divides the elements evenly among samples.
pub fn dropout(dropout: Dropout<'_>, len: usize) -> Result<(), Error> {
    expect_rows("elements of samples under dropout", dropout.keys.len(), len)
}

/// That there is one frequency for each pair of elements of a head.
pub fn rope(dims: AttentionDims, frequencies: usize) -> Result<(), Error> {
    expect_rows("elements of a rotated head", 2, dims.head_dim)?;
    expect("inverse frequencies", frequencies, dims.head_dim / 2)
}

/// Elements of a host slice.
pub fn of_host(slice: &HostSlice<'_>) -> usize {
    match slice {
        HostSlice::F32(slice) => slice.len(),
        HostSlice::F64(slice) => slice.len(),
        HostSlice::U32(slice) => slice.len(),
        HostSlice::I64(slice) => slice.len(),
    }
}

/// Elements of a writable host slice.
pub fn of_host_mut(slice: &HostSliceMut<'_>) -> usize {
    match slice {
        HostSliceMut::F32(slice) => slice.len(),
        HostSliceMut::F64(slice) => slice.len(),
        HostSliceMut::I64(slice) => slice.len(),
    }
}
