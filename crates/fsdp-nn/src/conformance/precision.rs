//! Bounds the error of results in f32, bf16 and f16 relative to the host's in double precision, and of gradients in
//! slots of other dtypes.

use fsdp_core::DType;

use super::Subject;
use super::cases::{Sizes, all};
use super::kit::Kit;
use crate::HostMemory;
use crate::backend::Backend;

pub(super) const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::Bf16, DType::F16];

/// Relative error of one rounding to nearest.
pub(super) fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON / 2.0,
        DType::F32 => f64::from(f32::EPSILON) / 2.0,
        DType::F16 => half::f16::EPSILON.to_f64() / 2.0,
        _ => 1.0 / 256.0,
    }
}

/// Absolute error of a rounding: in f16, half of the smallest positive number; otherwise a value that is negligible
/// for the results of the suite.
pub(super) fn absolute_error(dtype: DType) -> f64 {
    if dtype == DType::F16 { half::f16::MIN_POSITIVE_SUBNORMAL.to_f64() / 2.0 } else { 1e-38 }
}

/// Checks that outputs of every operation are within the bounds of their arithmetic and of one rounding when stored.
///
/// # Panics
/// If one is not.
pub fn outputs_are_precise<M: Backend>(subject: &Subject<'_, M>, sizes: Sizes) {
    for (case, reference) in all(sizes).into_iter().zip(all::<HostMemory>(sizes)) {
        let exact = (reference.forward)(&Kit::host(DType::F64), &case.inputs);
        let (roundings, magnitudes) = (case.bound)(&case.inputs, &exact);
        let largest = case.inputs[0].iter().fold(0.0, |a: f64, b| b.abs().max(a));
        for dtype in FLOATS {
            let got = (case.forward)(&Kit::new((subject.memory)(), dtype), &case.inputs);
            // A sum of values v weighted by probabilities p, each with an error factor of 1 + u, has an error of at
            // most u * sum p |v| <= u * max |v|.
            let by_kernels = ["attention", "attention of documents", "attention with sinks"];
            let is_rounded = subject.rounds_probabilities && by_kernels.contains(&case.name);
            let probabilities = if is_rounded { unit(dtype) * largest } else { 0.0 };
            // The sum of each of up to four chunks is rounded, and so are the two levels of the tree over them. The last
            // of these roundings is that of the result.
            let parts = if case.name == "combine of chunks" { 2.0 * unit(dtype) } else { 0.0 };
            // What sinks scale has been rounded.
            let scaled = if case.name == "attention with sinks" { unit(dtype) } else { 0.0 };
            for ((got, exact), magnitude) in got.iter().zip(&exact).zip(&magnitudes) {
                let roundings = roundings * unit(dtype.master()) + parts;
                let arithmetic = roundings * magnitude * 1.01 + probabilities + scaled * exact.abs();
                let stored = unit(dtype) * (exact.abs() + arithmetic);
                let error = (got - exact).abs();
                assert!(
                    error <= arithmetic + stored + absolute_error(dtype),
                    "{} {dtype}: {got} for {exact}, more than {arithmetic} + {stored}",
                    case.name
                );
            }
        }
    }
}

/// Checks that gradients in slots of another dtype equal those of a slot in the type of arithmetic, rounded.
///
/// # Panics
/// If one does not.
pub fn slots_may_have_any_float_dtype<M: Backend>(subject: &Subject<'_, M>, sizes: Sizes) {
    let named = ["linear", "embedding", "rms_norm"];
    for case in all(sizes).into_iter().filter(|case| named.contains(&case.name)) {
        for dtype in FLOATS {
            let wide = Kit { slots: dtype.master(), ..Kit::new((subject.memory)(), dtype) };
            let expected = (case.backward)(&wide, &case.inputs, &case.doutput);
            // Kernels may add in another order for another slot dtype; the sums then differ by their own roundings,
            // in proportion to the number and size of terms.
            let order = if subject.adds_alike { 0.0 } else { reordering(&case.inputs, &case.doutput, dtype) };
            for slots in FLOATS {
                let kit = Kit { slots, ..Kit::new((subject.memory)(), dtype) };
                let got = (case.backward)(&kit, &case.inputs, &case.doutput);
                for (expected, got) in expected.iter().zip(&got) {
                    for (expected, got) in expected.iter().zip(got) {
                        let error = (expected - got).abs();
                        assert!(
                            error <= unit(slots) * (expected.abs() + order) + order + absolute_error(slots),
                            "{} {dtype} into {slots}: {got} for {expected}",
                            case.name
                        );
                    }
                }
            }
        }
    }
}

/// Bound of the difference between two orders of adding a gradient: `2 (n - 1) u` times the sum of the absolute
/// terms, where there are at most `n` rows, and no term exceeds the product of the largest factors.
fn reordering(inputs: &[Vec<f64>], doutput: &[f64], dtype: DType) -> f64 {
    let largest = |values: &[f64]| values.iter().fold(0.0, |a: f64, b| b.abs().max(a));
    let factors = inputs.iter().map(|input| largest(input).max(1.0)).product::<f64>() * largest(doutput);
    let rows = doutput.len() as f64;
    2.0 * rows * unit(dtype.master()) * rows * factors
}
