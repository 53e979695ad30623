//! How the direction of an update follows from the state: the rule of the run file, and those that it is mistaken for.

use crate::config::{AdamwConfig, OptimizerConfig};

/// Values of epsilon that programs use.
const EPSILONS: [f64; 13] =
    [0.0, 1e-20, 1e-16, 1e-15, 1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3];

/// Values of an element around the step.
pub(super) struct Element {
    /// The first moment after the step.
    pub(super) first: f64,
    /// The first moment before the step.
    pub(super) first_before: f64,
    /// The second moment after the step; 0 if the rule has none.
    pub(super) second: f64,
    /// The gradient that the update used.
    pub(super) gradient: f64,
}

/// How a direction follows from the state.
pub(super) type Direction = Box<dyn Fn(&Element, u64) -> f64>;

/// A rule, with what the user reads if it explains the update and the stated one does not.
pub(super) struct Rule {
    pub(super) text: String,
    pub(super) direction: Direction,
}

/// The rule of the run file first, then those that it is mistaken for.
pub(super) fn rules(optimizer: &OptimizerConfig) -> Vec<Rule> {
    let rule = |text: &str, direction: Direction| Rule { text: text.to_owned(), direction };
    match optimizer {
        OptimizerConfig::Adamw(config) => adamw_rules(config),
        OptimizerConfig::Lion(config) => {
            let beta = config.betas[0];
            vec![rule(
                "",
                Box::new(move |at, _| {
                    let value = beta * at.first_before + (1.0 - beta) * at.gradient;
                    if value == 0.0 { 0.0 } else { value.signum() }
                }),
            )]
        }
        OptimizerConfig::Sgd(config) => {
            let (momentum, nesterov) = (config.momentum, config.nesterov);
            let plain = rule("momentum is not that of Nesterov", Box::new(|at, _| at.first));
            let ahead = rule(
                "momentum is that of Nesterov",
                Box::new(move |at, _| at.gradient + momentum * at.first),
            );
            if nesterov { vec![ahead, plain] } else { vec![plain, ahead] }
        }
        _ => Vec::new(),
    }
}

pub(super) fn adamw_rules(config: &AdamwConfig) -> Vec<Rule> {
    let ([beta1, beta2], eps) = (config.betas, config.eps);
    let correction = |beta: f64, step: u64| 1.0 - beta.powi(i32::try_from(step).unwrap_or(i32::MAX));
    let corrected = move |shift: i64, eps: f64| -> Direction {
        Box::new(move |at, step| {
            let step = step.saturating_add_signed(shift).max(1);
            let root = (at.second / correction(beta2, step)).sqrt() + eps;
            if root == 0.0 { 0.0 } else { at.first / correction(beta1, step) / root }
        })
    };
    let rule = |text: &str, direction: Direction| Rule { text: text.to_owned(), direction };
    let mut rules = vec![
        rule("", corrected(0, eps)),
        rule(
            "moments are not corrected for their bias",
            Box::new(move |at, _| at.first / (at.second.sqrt() + eps)),
        ),
        rule(
            "only the first moment is corrected for its bias",
            Box::new(move |at, step| at.first / correction(beta1, step) / (at.second.sqrt() + eps)),
        ),
        rule(
            "only the second moment is corrected for its bias",
            Box::new(move |at, step| at.first / ((at.second / correction(beta2, step)).sqrt() + eps)),
        ),
        rule("the bias of moments is corrected for one step too many", corrected(1, eps)),
        rule("the bias of moments is corrected for one step too few", corrected(-1, eps)),
        rule(
            "epsilon is added to the second moment before its root is taken",
            Box::new(move |at, step| {
                at.first / correction(beta1, step) / (at.second / correction(beta2, step) + eps).sqrt()
            }),
        ),
        rule(
            "epsilon is added before the second moment is corrected for its bias",
            Box::new(move |at, step| {
                at.first * correction(beta2, step).sqrt() / correction(beta1, step) / (at.second.sqrt() + eps)
            }),
        ),
    ];
    for other in EPSILONS.into_iter().filter(|other| *other != eps) {
        rules.push(rule(&format!("epsilon is {other:e}, the run file says {eps:e}"), corrected(0, other)));
    }
    rules
}
