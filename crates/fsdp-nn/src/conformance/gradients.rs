//! Compares backward with central differences of forward, in double precision.

use fsdp_core::DType;

use super::Subject;
use super::cases::{Sizes, all};
use super::kit::{Case, Kit, numbers};
use crate::backend::Backend;

/// The sum of outputs weighted by their gradients.
fn objective<M>(case: &Case<M>, kit: &Kit<M>, inputs: &[Vec<f64>]) -> f64 {
    (case.forward)(kit, inputs).iter().zip(&case.doutput).map(|(y, dy)| y * dy).sum()
}

/// The derivative of the objective along `direction` of one input.
fn slope<M>(case: &Case<M>, kit: &Kit<M>, input: usize, direction: &[f64]) -> f64 {
    const STEP: f64 = 1e-5;
    let shifted = |step: f64| {
        let mut inputs = case.inputs.clone();
        inputs[input].iter_mut().zip(direction).for_each(|(x, d)| *x += step * d);
        objective(case, kit, &inputs)
    };
    (shifted(STEP) - shifted(-STEP)) / (2.0 * STEP)
}

fn check<M>(case: &Case<M>, kit: &Kit<M>) {
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

/// Checks that the gradients of every operation are derivatives.
///
/// # Panics
/// If one is not.
pub fn gradients_match_finite_differences<M: Backend>(subject: &Subject<'_, M>, sizes: Sizes) {
    for case in all(sizes) {
        check(&case, &Kit::new((subject.memory)(), DType::F64));
    }
}

/// Checks that gradients are added to the current contents if the target accumulates.
///
/// # Panics
/// If they are not.
pub fn accumulation_adds<M: Backend>(subject: &Subject<'_, M>, sizes: Sizes) {
    for case in all(sizes) {
        let plain = (case.backward)(&Kit::new((subject.memory)(), DType::F64), &case.inputs, &case.doutput);
        let kit = Kit { base: Some(2.5), ..Kit::new((subject.memory)(), DType::F64) };
        let added = (case.backward)(&kit, &case.inputs, &case.doutput);
        for (index, (plain, added)) in plain.iter().zip(&added).enumerate() {
            let base = if accumulates(case.name, index) { 2.5 } else { 0.0 };
            for (plain, added) in plain.iter().zip(added) {
                assert!((plain + base - added).abs() < 1e-12 * (1.0 + plain.abs()), "{}", case.name);
            }
        }
    }
}

/// Whether a gradient has a target that may accumulate; the others are overwritten.
fn accumulates(operation: &str, gradient: usize) -> bool {
    match operation {
        "linear" | "embedding" | "rms_norm" | "layer_norm" | "dispatch" | "expert_product"
        | "copy_columns" | "short convolution" => true,
        // The gradient of the addend is the gradient of the sum.
        "linear_add" => gradient < 2,
        // That of the values replaces the gradient of the output.
        "rescale" => gradient > 0,
        // The gradient of what a bias is added to is that of the sum.
        "expert_bias" => gradient > 0,
        // Those of rows and gates are overwritten.
        "delta rule" => gradient > 1,
        // The gradient of the hidden states is overwritten.
        "head_loss" => gradient == 1,
        _ => false,
    }
}
