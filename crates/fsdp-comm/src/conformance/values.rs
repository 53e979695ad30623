//! Test data, and the naively computed results to compare with.
//!
//! Values are kept as `f64` whatever the dtype: every float dtype and every integer used here fits exactly.

use fsdp_core::comm::ReduceOp;
use fsdp_core::memory::{Buffer, Category, HostSlice, HostSliceMut, Slice, SliceMut};
use fsdp_core::{DType, Error, Memory, Queue, tree};

/// Rounds `value` to the nearest value of `dtype`, by way of `f32` for bf16 and f16.
pub(super) fn round(dtype: DType, value: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(value as f32),
        DType::Bf16 => f64::from(half::bf16::from_f32(value as f32)),
        DType::F16 => f64::from(half::f16::from_f32(value as f32)),
        DType::F64 | DType::U8 | DType::U32 | DType::I64 => value,
    }
}

/// Pseudo-random values, different for every rank and segment, of very different magnitudes, so that another order of
/// addition yields other bits.
pub(super) fn values(dtype: DType, rank: usize, segment: usize, len: usize) -> Vec<f64> {
    let value = |index: usize| {
        let mut bits = (rank as u64) << 40 | (segment as u64) << 32 | index as u64;
        for factor in [0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb] {
            bits = (bits ^ bits >> 29).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(factor);
        }
        let integer = (bits >> 40) as f64 - f64::from(1 << 23);
        match dtype {
            DType::U8 => (bits >> 56) as f64,
            _ if dtype.is_float() => {
                // Keeps sums in f16 below 2^16.
                let extra_shift = if dtype == DType::F16 { 13 } else { 0 };
                round(dtype, integer * 2f64.powi(-((bits % 23) as i32) - extra_shift))
            }
            _ => integer,
        }
    };
    (0..len).map(value).collect()
}

/// The sum or average over `ranks` of their [`values`], added along the tree.
pub(super) fn reduced(dtype: DType, op: ReduceOp, ranks: &[usize], segment: usize, len: usize) -> Vec<f64> {
    let factor = match op {
        ReduceOp::Sum => 1.0,
        ReduceOp::Average => round(dtype, 1.0 / ranks.len() as f64),
    };
    let mut leaf = |rank: usize| -> Vec<f64> {
        let values = values(dtype, ranks[rank], segment, len);
        values.into_iter().map(|value| round(dtype, value * factor)).collect()
    };
    let mut add =
        |left: Vec<f64>, right: Vec<f64>| left.iter().zip(&right).map(|(a, b)| round(dtype, a + b)).collect();
    tree::fold(0, ranks.len(), &mut leaf, &mut add)
}

/// Creates a buffer with these contents, ready on `queue`.
fn buffer<M: Memory>(memory: &M, queue: Queue, dtype: DType, values: &[f64]) -> Result<M::Buffer, Error> {
    let mut buffer = memory.allocate(Category::CommStaging, dtype, values.len())?;
    let to = SliceMut::whole(&mut buffer);
    if dtype == DType::I64 {
        let integers: Vec<i64> = values.iter().map(|&value| value as i64).collect();
        memory.write(queue, HostSlice::I64(&integers), to)?;
    } else {
        memory.write_numbers(queue, values, to)?;
    }
    Ok(buffer)
}

/// Creates buffers with undefined contents.
pub(super) fn empty<M: Memory>(memory: &M, dtype: DType, lens: &[usize]) -> Result<Vec<M::Buffer>, Error> {
    lens.iter().map(|&len| memory.allocate(Category::CommStaging, dtype, len)).collect()
}

/// Creates buffers with the [`values`] of this rank, one per length and each `times` as long, ready on `queue`: the
/// queue on which a collective expects its inputs.
pub(super) fn filled<M: Memory>(
    memory: &M,
    queue: Queue,
    dtype: DType,
    rank: usize,
    lens: &[usize],
    times: usize,
) -> Result<Vec<M::Buffer>, Error> {
    let fill = |(segment, len)| buffer(memory, queue, dtype, &values(dtype, rank, segment, len * times));
    lens.iter().copied().enumerate().map(fill).collect()
}

/// Compares contents bit for bit, as the compute queue sees them.
pub(super) fn assert_contents<M: Memory>(
    memory: &M,
    buffer: &M::Buffer,
    expected: &[f64],
    what: &str,
) -> Result<(), Error> {
    let mut got = vec![0.0; buffer.len()];
    if buffer.dtype() == DType::I64 {
        let mut integers = vec![0; buffer.len()];
        memory.read(Queue::Compute, Slice::whole(buffer), HostSliceMut::I64(&mut integers))?;
        got.iter_mut().zip(integers).for_each(|(out, value)| *out = value as f64);
    } else {
        memory.read_numbers(Queue::Compute, Slice::whole(buffer), &mut got)?;
    }
    assert_eq!(got.len(), expected.len(), "{what}: length");
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.to_bits(), expected.to_bits(), "{what}: element {index}: {got} != {expected}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn average_over_three_ranks_differs_from_divided_sum() {
        let ranks = [0, 1, 2];
        for dtype in [DType::F32, DType::F64, DType::Bf16, DType::F16] {
            let average = reduced(dtype, ReduceOp::Average, &ranks, 0, 64);
            let sum = reduced(dtype, ReduceOp::Sum, &ranks, 0, 64);
            let third = round(dtype, 1.0 / 3.0);
            assert_ne!(average, sum.iter().map(|value| round(dtype, value * third)).collect::<Vec<_>>());
            assert_ne!(average, sum.iter().map(|value| round(dtype, value / 3.0)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn average_over_power_of_two_equals_divided_sum() {
        for ranks in [&[4][..], &[0, 1], &[3, 1, 0, 2]] {
            for dtype in [DType::F32, DType::F64, DType::Bf16] {
                let average = reduced(dtype, ReduceOp::Average, ranks, 1, 64);
                let sum = reduced(dtype, ReduceOp::Sum, ranks, 1, 64);
                let divided: Vec<f64> = sum.iter().map(|value| value / ranks.len() as f64).collect();
                assert_eq!(average, divided);
            }
        }
    }
}
