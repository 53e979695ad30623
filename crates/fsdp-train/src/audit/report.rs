//! The result of an audit.

use serde::Serialize;

/// A fault has to explain so much of the difference to be named.
pub(super) const EXPLAINED_MIN: f64 = 0.95;

/// What is wrong with a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// A gradient was multiplied by a factor.
    GradientScaled,
    /// A gradient, or the share of a micro-batch, did not arrive.
    GradientMissing,
    /// Means over micro-batches or ranks were averaged, though they counted different numbers of tokens.
    LossMeanOfMeans,
    /// Padding or prompts counted, or labels were shifted a second time or not at all.
    TokensCounted,
    /// Documents that share a row saw each other.
    DocumentsAttend,
    /// Positions did not restart with each document.
    Positions,
    /// A tied weight got only the share of one of its uses.
    TiedGradientMissing,
    /// Gradients were clipped by another norm, or not at all.
    Clipping,
    /// The learning rate of the step.
    LearningRate,
    /// Weight decay: its size, its parameters or its place.
    WeightDecay,
    /// Moments or the update do not follow the rule.
    UpdateRule,
    /// Dropout was active.
    DropoutActive,
    /// The model computes something else, or at other weights.
    ModelDiffers,
    /// The balancing loss of routers had another coefficient.
    AuxiliaryLoss,
    /// No hypothesis explains what was found.
    Unexplained,
}

/// Something that is wrong.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// What it is.
    pub cause: Cause,
    /// Names of the parameters that it concerns; empty if it concerns all.
    pub params: Vec<String>,
    /// Actual size divided by the expected one; `None` if the fault has no size.
    pub factor: Option<f64>,
    /// The share of the difference that the fault explains, from 0 to 1.
    pub explains: f64,
    /// One sentence for the user.
    pub text: String,
}

impl Finding {
    /// Something that concerns all parameters, and has no size.
    pub(super) fn of_all(cause: Cause, explains: f64, text: String) -> Self {
        Self { cause, params: Vec::new(), factor: None, explains, text }
    }
}

/// Gradients of one parameter, or of all parameters of a kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GradientRow {
    /// Name; the numbers of layers are `*` where it stands for several parameters.
    pub name: String,
    /// Norm of the expected gradient, after clipping.
    pub expected: f64,
    /// Norm of the gradient that the update used.
    pub used: f64,
    /// The factor of the expected gradient that is nearest to the used one; `None` without an expected gradient.
    pub factor: Option<f64>,
    /// Cosine of the angle between both; `None` if one is zero.
    pub cosine: Option<f64>,
    /// What the factor does not explain, relative to the norm of the expected gradient.
    pub residual: f64,
    /// The difference that precision alone may make, relative to the norm of the expected gradient.
    pub bound: f64,
}

/// The update of one group of parameters, given the gradient that it used.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct UpdateRow {
    /// The group: one of its parameters, and how many others it has.
    pub name: String,
    /// Learning rate that the run file asks for.
    pub lr: f64,
    /// Learning rate that explains the update best.
    pub lr_found: f64,
    /// Weight decay that the run file asks for.
    pub weight_decay: f64,
    /// Weight decay that explains the update best.
    pub weight_decay_found: f64,
    /// What the expected update leaves unexplained, relative to its norm.
    pub residual: f64,
    /// What precision alone may leave.
    pub bound: f64,
}

/// The judgement of one step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// `"sound"` or `"findings"`.
    pub verdict: &'static str,
    /// Steps done before the judged one.
    pub step: u64,
    /// Judged steps. Of several, `groups` and `params` are changes of weights and moments in place of gradients.
    pub steps: usize,
    /// What is wrong, the most important first.
    pub findings: Vec<Finding>,
    /// The largest relative difference of a gradient that precision alone may make, of those that it does not hide.
    pub bound: f64,
    /// Gradients by kind of parameter.
    pub groups: Vec<GradientRow>,
    /// Gradients of each parameter, in the order of the model.
    pub params: Vec<GradientRow>,
    /// Updates by group of the optimizer.
    pub updates: Vec<UpdateRow>,
}

impl Report {
    /// The judgement of steps, with the rows of kinds and of parameters.
    pub(super) fn of(
        (step, steps): (u64, usize),
        findings: Vec<Finding>,
        [groups, params]: [Vec<GradientRow>; 2],
    ) -> Self {
        let verdict = if findings.is_empty() { "sound" } else { "findings" };
        let all = || params.iter().filter(|row| row.expected > 0.0).map(|row| row.bound);
        let smallest = all().min_by(f64::total_cmp).unwrap_or(0.0);
        let bound = all().filter(|bound| *bound < 1.0).fold(smallest, f64::max);
        Self { verdict, step, steps, findings, bound, groups, params, updates: Vec::new() }
    }

    /// The rows of parameters whose whole gradient could be the work of precision alone.
    pub fn hidden(&self) -> impl Iterator<Item = &GradientRow> {
        self.params.iter().filter(|row| row.expected > 0.0 && row.bound >= 1.0)
    }

    /// Whether nothing was found.
    pub fn is_sound(&self) -> bool {
        self.findings.is_empty()
    }
}

/// A number with four significant digits.
pub fn number(value: f64) -> String {
    let rounded: f64 = format!("{value:.3e}").parse().unwrap_or(value);
    if (1e-3..1e6).contains(&rounded.abs()) || rounded == 0.0 {
        format!("{rounded}")
    } else {
        format!("{rounded:e}")
    }
}

/// Up to three names, and how many there are.
pub(super) fn shown(names: &[String]) -> String {
    let first = names.iter().take(3).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(3) {
        0 => first,
        others => format!("{first} and {others} more"),
    }
}

/// Joins findings of rules that concern all parameters: both moments of an optimizer may have other settings.
pub(super) fn joined(findings: Vec<Finding>) -> Vec<Finding> {
    let is_rule = |finding: &Finding| finding.cause == Cause::UpdateRule && finding.params.is_empty();
    let mut joined: Vec<Finding> = Vec::new();
    for finding in findings {
        match joined.iter_mut().find(|other| is_rule(other) && is_rule(&finding)) {
            Some(other) => other.text += &format!("; {}", finding.text),
            None => joined.push(finding),
        }
    }
    joined
}

/// The name of a parameter without the numbers of layers and experts.
pub(super) fn kind_of(name: &str) -> String {
    let part = |part: &str| {
        if part.bytes().all(|byte| byte.is_ascii_digit()) { "*".to_owned() } else { part.to_owned() }
    };
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(expected: f64, bound: f64) -> GradientRow {
        let name = "p".to_owned();
        GradientRow { name, expected, used: 1.0, factor: None, cosine: None, residual: 0.0, bound }
    }

    #[test]
    fn bound_is_that_of_what_precision_shows() {
        let of = |rows: &[GradientRow]| {
            let report = Report::of((0, 1), Vec::new(), [Vec::new(), rows.to_vec()]);
            (report.bound, report.hidden().count())
        };
        assert_eq!(of(&[row(1.0, 1e-5), row(2.0, 1e-4), row(0.0, 0.5), row(1e-9, 1e20)]), (1e-4, 1));
        // Nothing is shown.
        assert_eq!(of(&[row(1.0, 3.0), row(1.0, 2.0)]), (2.0, 2));
        assert_eq!(of(&[]), (0.0, 0));
    }
}
