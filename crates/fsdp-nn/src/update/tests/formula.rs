//! Checks that the recorded formula of a rule gives the bits of the rule itself, on random numbers.

use super::*;
use crate::update::{Calculation, Elementwise, ElementwiseRule, Input, STATES_MAX, Term};

fn calculate(calculation: Calculation<f32>) -> f32 {
    match calculation {
        Calculation::Add(a, b) => a + b,
        Calculation::Subtract(a, b) => a - b,
        Calculation::Multiply(a, b) => a * b,
        Calculation::Divide(a, b) => a / b,
        Calculation::SquareRoot(a) => a.sqrt(),
        Calculation::IfLess(a, b, then, otherwise) => {
            if a < b {
                then
            } else {
                otherwise
            }
        }
    }
}

/// Compares the formula with the rule, for an element in a step.
fn compare(rule: &impl Elementwise, step: u64, gradient: f32, param: f32, state: [f32; STATES_MAX]) {
    let factors: Vec<f32> =
        rule.factors_of(ParamId(1), step, 0.1).into_iter().map(|factor| factor as f32).collect();
    let (formula, constants) = rule.formula();
    assert_eq!((formula.factors, formula.constants), (factors.len(), constants.len()));
    let input = |input| match input {
        Input::Gradient => gradient,
        Input::Param => param,
        Input::State(index) => state[index],
        Input::Factor(index) => factors[index],
        Input::Constant(index) => constants[index] as f32,
    };
    let (found_param, found_state) = formula.results(input, calculate);
    let mut expected = state;
    let expected_param = rule.step(&factors, gradient, param, &mut expected);
    assert_eq!(found_param.unwrap_or(param).to_bits(), expected_param.to_bits(), "{rule:?}");
    let kept = found_state.len();
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&found_state), bits(&expected[..kept]), "{rule:?}");
    assert_eq!(bits(&state[kept..]), bits(&expected[kept..]), "state that the rule does not have");
    assert_eq!(rule.changes_params(), formula.param.is_some());
}

proptest! {
    #[test]
    fn formulas_match_rules_bitwise(
        step in 1u64..5,
        gradient in -3.0f64..3.0,
        param in -3.0f64..3.0,
        state in prop::array::uniform3(-1.0f64..1.0),
        beta in prop::sample::select(vec![0.0, 0.3, 0.5, 0.9]),
    ) {
        let (gradient, param, state) = (gradient as f32, param as f32, state.map(|value| value.abs() as f32));
        let groups = groups(0.1);
        let betas = (beta, 0.99);
        compare(&AdamW { betas, eps: 1e-8, groups: groups.clone() }, step, gradient, param, state);
        compare(&Lion { betas, groups: groups.clone() }, step, gradient, param, state);
        compare(&Ema { decay: beta }, step, gradient, param, state);
        let sgd = Sgd { momentum: beta, dampening: 0.0, nesterov: beta > 0.4, groups: groups.clone() };
        compare(&sgd, step, gradient, param, state);
        let free = ScheduleFree { betas, eps: 1e-8, warmup_steps: 3, groups };
        compare(&free, step, gradient, param, state);
    }
}

#[test]
fn formulas_know_what_does_not_change() {
    let (average, constants) = Ema { decay: 0.9 }.formula();
    assert_eq!((average.param, average.state.len(), constants), (None, 1, vec![1.0, 0.5]));
    let (plain, _) = Sgd::default().formula();
    assert_eq!((plain.state, plain.factors), (Vec::<Term>::new(), 3));
    // Other settings are other constants of the same formula.
    let [one, other] = [0.9, 0.8].map(|beta| AdamW { betas: (beta, 0.95), ..AdamW::default() }.formula());
    assert_eq!(one.0, other.0);
    assert_ne!(one.1, other.1);
}
