//! The same bits for every number of threads and every alignment, and agreement between dtypes.

use fsdp_core::DType;
use proptest::prelude::*;

use super::cases::{Sizes, all};
use super::{Case, Kit};

const FLOATS: [DType; 3] = [DType::F32, DType::F64, DType::Bf16];

/// Outputs and gradients, as bits.
fn bits(case: &Case, kit: &Kit) -> Vec<Vec<u64>> {
    let mut all = (case.backward)(kit, &case.inputs, &case.doutput);
    all.push((case.forward)(kit, &case.inputs));
    all.into_iter().map(|values| values.into_iter().map(f64::to_bits).collect()).collect()
}

fn check_bits(sizes: Sizes) {
    for dtype in FLOATS {
        for case in all(sizes) {
            let expected = bits(&case, &Kit::new(dtype));
            for (threads, shift) in [(1, 1), (2, 0), (3, 3), (8, 7)] {
                let got = bits(&case, &Kit::with(dtype, threads, shift));
                assert!(expected == got, "{} {dtype}: {threads} threads, shift {shift}", case.name);
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads_and_alignment() {
    check_bits(Sizes { rows: 1, inner: 1, outer: 1, seed: 1 });
    check_bits(Sizes { rows: 131, inner: 67, outer: 33, seed: 1 });
    check_bits(Sizes { rows: 300, inner: 256, outer: 515, seed: 1 });
}

/// The error of one rounding to nearest, relative.
fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON / 2.0,
        DType::F32 => f64::from(f32::EPSILON) / 2.0,
        _ => 1.0 / 256.0,
    }
}

fn check_precision(sizes: Sizes) {
    for case in all(sizes) {
        let exact = (case.forward)(&Kit::new(DType::F64), &case.inputs);
        let (roundings, magnitudes) = (case.bound)(&case.inputs, &exact);
        for dtype in [DType::F32, DType::Bf16] {
            let got = (case.forward)(&Kit::new(dtype), &case.inputs);
            for ((got, exact), magnitude) in got.iter().zip(&exact).zip(&magnitudes) {
                let arithmetic = roundings * unit(DType::F32) * magnitude * 1.01;
                let stored = unit(dtype) * (exact.abs() + arithmetic);
                let error = (got - exact).abs();
                assert!(
                    error <= arithmetic + stored + 1e-38,
                    "{} {dtype}: {got} for {exact}, more than {arithmetic} + {stored}",
                    case.name
                );
            }
        }
    }
}

/// Gradients in slots of another dtype are those of a slot in the type of arithmetic, rounded.
fn check_slots(sizes: Sizes) {
    for case in all(sizes).into_iter().filter(|case| ["linear", "embedding", "rms_norm"].contains(&case.name))
    {
        for dtype in FLOATS {
            let wide = Kit { slots: dtype.master(), ..Kit::new(dtype) };
            let expected = (case.backward)(&wide, &case.inputs, &case.doutput);
            for slots in FLOATS {
                let got = (case.backward)(&Kit { slots, ..Kit::new(dtype) }, &case.inputs, &case.doutput);
                for (expected, got) in expected.iter().zip(&got) {
                    for (expected, got) in expected.iter().zip(got) {
                        let error = (expected - got).abs();
                        assert!(
                            error <= unit(slots) * expected.abs() + 1e-38,
                            "{} {dtype} into {slots}: {got} for {expected}",
                            case.name
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn gradient_slots_may_have_any_float_dtype() {
    check_slots(Sizes { rows: 9, inner: 12, outer: 7, seed: 3 });
    check_slots(Sizes { rows: 20, inner: 600, outer: 530, seed: 3 });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn single_and_half_precision_are_near_double(
        rows in 1usize..40, inner in 1usize..70, outer in 1usize..70, seed in 0u64..1000,
    ) {
        check_precision(Sizes { rows, inner, outer, seed });
    }

    #[test]
    fn bits_of_random_sizes(rows in 1usize..80, inner in 1usize..40, outer in 1usize..40, seed in 0u64..1000) {
        check_bits(Sizes { rows, inner, outer, seed });
    }
}
