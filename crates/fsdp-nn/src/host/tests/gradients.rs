//! Backward against central differences of forward, in double precision.

use fsdp_core::DType;
use proptest::prelude::*;

use super::cases::{Sizes, all};
use super::{Case, Kit, numbers};

/// The sum of outputs weighted by their gradients.
fn objective(case: &Case, kit: &Kit, inputs: &[Vec<f64>]) -> f64 {
    (case.forward)(kit, inputs).iter().zip(&case.doutput).map(|(y, dy)| y * dy).sum()
}

/// The slope of the objective along `direction` of one input.
fn slope(case: &Case, kit: &Kit, input: usize, direction: &[f64]) -> f64 {
    const STEP: f64 = 1e-5;
    let shifted = |step: f64| {
        let mut inputs = case.inputs.clone();
        inputs[input].iter_mut().zip(direction).for_each(|(x, d)| *x += step * d);
        objective(case, kit, &inputs)
    };
    (shifted(STEP) - shifted(-STEP)) / (2.0 * STEP)
}

fn check(case: &Case, kit: &Kit) {
    let gradients = (case.backward)(kit, &case.inputs, &case.doutput);
    assert_eq!(gradients.len(), case.inputs.len());
    for (input, gradient) in gradients.iter().enumerate() {
        let len = gradient.len();
        let random = (0..3).map(|i| numbers(77 + i, len));
        let single =
            [0, len / 2, len - 1].map(|at| (0..len).map(|i| f64::from(i == at)).collect::<Vec<f64>>());
        for direction in random.chain(single) {
            let expected = slope(case, kit, input, &direction);
            let got: f64 = gradient.iter().zip(&direction).map(|(g, d)| g * d).sum();
            let scale: f64 = gradient.iter().zip(&direction).map(|(g, d)| (g * d).abs()).sum();
            assert!(
                (got - expected).abs() <= 1e-6 * (scale + 1.0),
                "{}: input {input}: {got} where differences give {expected}",
                case.name
            );
        }
    }
}

#[test]
fn of_sizes_that_span_several_blocks() {
    for (rows, inner, outer) in [(1, 1, 1), (2, 3, 5), (150, 17, 7), (67, 64, 129)] {
        for case in all(Sizes { rows, inner, outer, seed: 5 }) {
            check(&case, &Kit::new(DType::F64));
        }
    }
}

#[test]
fn accumulation_adds_to_what_is_there() {
    for case in all(Sizes { rows: 13, inner: 10, outer: 11, seed: 2 }) {
        let plain = (case.backward)(&Kit::new(DType::F64), &case.inputs, &case.doutput);
        let kit = Kit { base: Some(2.5), ..Kit::new(DType::F64) };
        let added = (case.backward)(&kit, &case.inputs, &case.doutput);
        for (plain, added) in plain.iter().zip(&added) {
            // Operations without an accumulating target overwrite.
            let base = if (added[0] - plain[0]).abs() > 1.0 { 2.5 } else { 0.0 };
            for (plain, added) in plain.iter().zip(added) {
                assert!((plain + base - added).abs() < 1e-12 * (1.0 + plain.abs()), "{}", case.name);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn of_random_sizes(rows in 1usize..24, inner in 1usize..20, outer in 1usize..20, seed in 0u64..1000) {
        for case in all(Sizes { rows, inner, outer, seed }) {
            check(&case, &Kit::new(DType::F64));
        }
    }
}
