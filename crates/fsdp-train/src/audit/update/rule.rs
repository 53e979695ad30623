//! How the direction of an update follows from the state: the rule of the run file, and those that it is mistaken for.

use std::cell::Cell;

use fsdp_config::{AdamwConfig, LionConfig, OptimizerConfig};

/// First betas of Lion that programs use; 0 is the sign of the gradient alone.
const LION_BETAS: [f64; 5] = [0.9, 0.95, 0.98, 0.99, 0.0];

/// The rate at which the momentum of `torch.optim.NAdam` grows with the steps.
const NADAM_GROWTH: f64 = 0.004;

/// Values of an element around the step.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::audit) struct Element {
    /// The first moment after the step.
    pub(in crate::audit) first: f64,
    /// The first moment before the step.
    pub(in crate::audit) first_before: f64,
    /// The second moment after the step; 0 if the rule has none.
    pub(in crate::audit) second: f64,
    /// The largest second moment of all steps; 0 if the state does not have it.
    pub(in crate::audit) largest: f64,
    /// The gradient that the update used.
    pub(in crate::audit) gradient: f64,
    /// What rounding of the first moment may change of the gradient.
    pub(in crate::audit) error: f64,
}

/// How a direction follows from the state; `None` if rounding decides on it.
pub(in crate::audit) type Direction = Box<dyn Fn(&Element, u64) -> Option<f64>>;

/// A rule, with what the user reads if it explains the update and the stated one does not.
pub(super) struct Rule {
    pub(super) text: String,
    /// A size of the rule divided by that of the run file, if it is one size that differs.
    pub(super) factor: Option<f64>,
    pub(super) direction: Direction,
}

impl Rule {
    fn new(text: &str, direction: Direction) -> Self {
        Self { text: text.to_owned(), factor: None, direction }
    }

    /// AdamW with another epsilon.
    pub(super) fn with_epsilon(config: &AdamwConfig, eps: f64) -> Self {
        let text = format!("epsilon is {eps:e}, the run file says {:e}", config.eps);
        let factor = (config.eps > 0.0).then(|| eps / config.eps);
        Self { factor, ..Self::new(&text, adamw(&AdamwConfig { eps, ..config.clone() }, 0)) }
    }

    /// AdamW with the bias corrected as in step `other`, in step `step`.
    pub(super) fn in_step(config: &AdamwConfig, other: u64, step: u64) -> Self {
        let text = format!(
            "the bias of moments is corrected as in step {other}, though the optimizer is in step {step}"
        );
        Self::new(&text, adamw(config, other.cast_signed() - step.cast_signed()))
    }

    /// AMSGrad.
    pub(super) fn of_largest(config: &AdamwConfig) -> Self {
        let stated = adamw(config, 0);
        let text = "the update divides by the largest second moment of all steps (AMSGrad), not by that of this step";
        Self::new(text, Box::new(move |at, step| stated(&Element { second: at.largest, ..*at }, step)))
    }
}

/// The direction that the run file asks for; `None` for an optimizer whose update is not that of single elements.
pub(in crate::audit) fn direction(optimizer: &OptimizerConfig) -> Option<Direction> {
    let rules = rules(optimizer);
    rules.into_iter().next().map(|rule| rule.direction)
}

/// The rule of the run file first, then those that it is mistaken for.
pub(super) fn rules(optimizer: &OptimizerConfig) -> Vec<Rule> {
    match optimizer {
        OptimizerConfig::Adamw(config) => adamw_rules(config),
        OptimizerConfig::Lion(config) => lion_rules(config),
        OptimizerConfig::Sgd(config) => {
            let (momentum, nesterov) = (config.momentum, config.nesterov);
            let plain = Rule::new("momentum is not that of Nesterov", Box::new(|at, _| Some(at.first)));
            let ahead = Rule::new(
                "momentum is that of Nesterov",
                Box::new(move |at, _| Some(at.gradient + momentum * at.first)),
            );
            if nesterov { vec![ahead, plain] } else { vec![plain, ahead] }
        }
        _ => Vec::new(),
    }
}

/// One minus the part of a moment that its beginning with zeros has left.
pub(super) fn correction(beta: f64, step: u64) -> f64 {
    1.0 - beta.powi(i32::try_from(step).unwrap_or(i32::MAX))
}

/// AdamW, with the bias corrected for `shift` steps more.
fn adamw(config: &AdamwConfig, shift: i64) -> Direction {
    let ([beta1, beta2], eps) = (config.betas, config.eps);
    Box::new(move |at, step| {
        let step = step.saturating_add_signed(shift).max(1);
        let root = (at.second / correction(beta2, step)).sqrt() + eps;
        Some(if root == 0.0 { 0.0 } else { at.first / correction(beta1, step) / root })
    })
}

fn adamw_rules(config: &AdamwConfig) -> Vec<Rule> {
    let ([beta1, beta2], eps) = (config.betas, config.eps);
    let root = move |at: &Element, step| (at.second / correction(beta2, step)).sqrt() + eps;
    vec![
        Rule::new("", adamw(config, 0)),
        Rule::new(
            "moments are not corrected for their bias",
            Box::new(move |at, _| Some(at.first / (at.second.sqrt() + eps))),
        ),
        Rule::new(
            "only the first moment is corrected for its bias",
            Box::new(move |at, step| Some(at.first / correction(beta1, step) / (at.second.sqrt() + eps))),
        ),
        Rule::new(
            "only the second moment is corrected for its bias",
            Box::new(move |at, step| Some(at.first / root(at, step))),
        ),
        Rule::new(
            "epsilon is added to the second moment before its root is taken",
            Box::new(move |at, step| {
                let root = (at.second / correction(beta2, step) + eps).sqrt();
                Some(at.first / correction(beta1, step) / root)
            }),
        ),
        Rule::new(
            "epsilon is added before the second moment is corrected for its bias",
            Box::new(move |at, step| {
                let first = at.first * correction(beta2, step).sqrt() / correction(beta1, step);
                Some(first / (at.second.sqrt() + eps))
            }),
        ),
        Rule::new(
            "the gradient is added to the momentum once more (Nesterov), corrected for the bias of this step",
            Box::new(move |at, step| {
                let first = beta1 * at.first + (1.0 - beta1) * at.gradient;
                Some(first / correction(beta1, step) / root(at, step))
            }),
        ),
        Rule::new("the gradient is added to the momentum once more, as in NAdam", nadam(config)),
    ]
}

/// `torch.optim.NAdam`, with its default growth of the momentum.
fn nadam(config: &AdamwConfig) -> Direction {
    let ([beta1, beta2], eps) = (config.betas, config.eps);
    let momentum = move |step: u64| beta1 * (1.0 - 0.5 * 0.96f64.powf(step as f64 * NADAM_GROWTH));
    // Shares of gradient and moment in the last step that was asked for: they are a product over all steps.
    let last = Cell::new((0, [0.0; 2]));
    Box::new(move |at, step| {
        if last.get().0 != step {
            let product: f64 = (1..=step).map(momentum).product();
            let [now, next] = [momentum(step), momentum(step + 1)];
            last.set((step, [(1.0 - now) / (1.0 - product), next / (1.0 - product * next)]));
        }
        let [of_gradient, of_moment] = last.get().1;
        let root = (at.second / correction(beta2, step)).sqrt() + eps;
        Some((of_gradient * at.gradient + of_moment * at.first) / root)
    })
}

fn lion_rules(config: &LionConfig) -> Vec<Rule> {
    let stated = config.betas[0];
    let rule = |beta: f64| -> Direction {
        Box::new(move |at, _| {
            let value = beta * at.first_before + (1.0 - beta) * at.gradient;
            match value.abs() {
                0.0 => Some(0.0),
                // Either sign.
                size if size <= (1.0 - beta) * at.error => None,
                _ => Some(value.signum()),
            }
        })
    };
    let others = LION_BETAS.into_iter().chain([config.betas[1]]).filter(|beta| *beta != stated);
    let other = |beta: f64| {
        let text = format!(
            "the direction is the sign of {beta} times the moment before the step and {} times the gradient; the run file says \
             {stated}",
            // As the shortest decimal.
            (1e9 * (1.0 - beta)).round() / 1e9
        );
        Rule::new(&text, rule(beta))
    };
    [Rule::new("", rule(stated))].into_iter().chain(others.map(other)).collect()
}
