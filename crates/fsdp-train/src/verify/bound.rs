//! Error bounds for runs without a promise of equal bits, derived in docs/numerics.md.
//!
//! A run and the oracle add the same leaves in different orders; averaging also rounds reciprocals and products. The
//! bounds apply to the gradients of the first step that was not skipped, element by element, and to their norm.

use fsdp_core::comm::ReduceOp;
use fsdp_core::plan::Plan;
use fsdp_core::{Axis, DType};

use super::{Promise, RankRun, Reference};
use crate::job::Job;
use crate::shard_runs::Kind;

/// The largest permitted distance of an element of the first gradient from the oracle's.
struct Bound {
    /// Factor of the sum of the absolute leaves.
    relative: f64,
    /// Error of products that are subnormal.
    absolute: f64,
}

/// The smallest tolerance for kernels other than the oracle's, in rounding errors of the largest gradient of a
/// parameter: a parameter of few elements may have few errors by chance.
const ROUNDINGS_MIN: f64 = 64.0;

/// The tolerance for kernels other than the oracle's, in largest rounding errors of the oracle. To first order, both have
/// rounding errors of about the same number and size, which pass through the same derivatives, so their maxima agree up
/// to a small factor. This one is chosen; about 1 to 2 was observed.
const ORACLE_ERRORS: f64 = 8.0;

/// The largest measured tolerance, as a fraction of the largest gradient of a parameter: a program that computes
/// nothing must not be within it.
const TOLERANCE_MAX: f64 = 0.25;

/// Rounding errors of the oracle's first applied step: its distance from the same computation in double precision.
pub(super) struct Rounding {
    /// Of the loss.
    pub(super) loss: f64,
    /// For each trained parameter, the largest of the elements of its gradient.
    pub(super) gradients: Vec<f64>,
}

/// The tolerance for a value of this magnitude, of which the oracle has an error of `error`, computed in `dtype`.
fn tolerance(error: f64, magnitude: f64, dtype: DType) -> f64 {
    let measured = (ORACLE_ERRORS * error).min(TOLERANCE_MAX * magnitude);
    measured.max(ROUNDINGS_MIN * unit_roundoff(dtype) * magnitude)
}

/// The largest relative error of one rounded operation.
fn unit_roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 2f64.powi(-53),
        DType::Bf16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        _ => 2f64.powi(-24),
    }
}

impl Bound {
    fn of(plan: &Plan) -> Self {
        let unit_roundoff = unit_roundoff(plan.policy.reduce_dtype);
        // The smallest positive number.
        let smallest = match plan.policy.reduce_dtype {
            DType::F64 => f64::from_bits(1),
            DType::Bf16 => 2f64.powi(-133),
            _ => f64::from(f32::from_bits(1)),
        };
        let leaves = (plan.step.rounds * plan.step.chunks * plan.mesh.world()) as f64;
        let additions = (leaves - 1.0) * unit_roundoff;
        if plan.policy.reduce_op == ReduceOp::Sum {
            return Self { relative: 2.0 * additions, absolute: 0.0 };
        }
        let axes = [plan.mesh.size(Axis::Replicate), plan.mesh.size(Axis::Shard)];
        let inexact = axes.into_iter().filter(|axis| !axis.is_power_of_two()).count() as f64;
        let averaged = if inexact == 0.0 {
            additions
        } else {
            // The reciprocal and the product of every such axis, and the product that reverts them.
            let roundings = leaves - 1.0 + 2.0 * inexact + 1.0;
            (roundings * unit_roundoff.ln_1p()).exp_m1()
        };
        let absolute = leaves * plan.step.averaged_ranks as f64 * smallest;
        Self { relative: additions + averaged, absolute }
    }

    /// The bound of an element with sum of absolute leaves `magnitude`.
    fn at(&self, magnitude: f64) -> f64 {
        self.relative * magnitude + self.absolute
    }
}

/// The bounds of all elements of each trained parameter.
fn bounds(plan: &Plan, reference: &Reference) -> Vec<Vec<f64>> {
    let (bound, dtype) = (Bound::of(plan), plan.policy.param_dtype);
    let of_param = |(index, magnitudes): (usize, &Vec<f64>)| {
        let largest = magnitudes.iter().copied().fold(0.0, f64::max);
        let rounding = reference.rounding.as_ref();
        let kernels = rounding.map_or(0.0, |found| tolerance(found.gradients[index], largest, dtype));
        magnitudes.iter().map(|&magnitude| bound.at(magnitude) + kernels).collect()
    };
    reference.magnitudes.iter().enumerate().map(of_param).collect()
}

/// Lists gradient elements outside their bounds in the first step that was not skipped, one per piece of a parameter,
/// and the norm if it is outside its bound. Empty if all steps were skipped.
pub(super) fn violations<A>(job: &Job<A>, reference: &Reference, ranks: &[RankRun]) -> Vec<String> {
    let (spec, bounds) = (&job.plan.spec, bounds(&job.plan, reference));
    let trained: Vec<usize> = (0..spec.params.len()).filter(|&id| spec.params[id].trainable).collect();
    let mut failures = Vec::new();
    if bounds.is_empty() {
        return failures;
    }
    for held in ranks.iter().flat_map(|run| &run.first.values).filter(|held| held.kind == Kind::Gradient) {
        let Ok(index) = trained.binary_search(&held.param.0) else { continue };
        let Some(expected) = &reference.first.gradients[held.param.0] else { continue };
        for (offset, got) in held.values.iter().enumerate() {
            let element = held.first + offset;
            let bound = bounds[index][element];
            let distance = (got - expected[element]).abs();
            if distance > bound || distance.is_nan() {
                let fqn = &spec.param(held.param).fqn;
                failures
                    .push(format!("gradient of {fqn}[{element}] is off by {distance:e}, bound {bound:e}"));
                break;
            }
        }
    }
    failures.extend(norm(job, reference, ranks, &bounds));
    failures
}

/// Describes the first gradient norm if it is outside its bound: norms differ by at most the norm of the difference.
fn norm<A>(job: &Job<A>, reference: &Reference, ranks: &[RankRun], bounds: &[Vec<f64>]) -> Option<String> {
    let first = reference.reports.iter().position(|report| report.finite)?;
    let (got, want) = (ranks[0].reports.get(first)?, &reference.reports[first]);
    let squares: f64 = bounds.iter().map(|all| all.iter().map(|bound| bound.powi(2)).sum::<f64>()).sum();
    let longest = job.plan.spec.params.iter().map(|param| param.row_len().unwrap_or(1)).max()?;
    // Both norms are computed in double precision: sums of squares of rows, a root, and the factor of the mean.
    let computed = (longest as f64 + 8.0) * 2f64.powi(-53) * want.grad_norm;
    let elements = bounds.iter().map(Vec::len).sum::<usize>() as f64;
    let bound = squares.sqrt() * (1.0 + elements * 2f64.powi(-53)) / (got.targets.max(1) as f64) + computed;
    let distance = (got.grad_norm - want.grad_norm).abs();
    (distance > bound || distance.is_nan())
        .then(|| format!("the first gradient norm is off by {distance:e}, bound {bound:e}"))
}

/// Describes the first loss if it differs from the oracle's, or, with other kernels, is not near it. With other kernels and
/// no applied step there is nothing to compare.
pub(super) fn first_loss<A>(job: &Job<A>, got: f64, reference: &Reference) -> Option<String> {
    let (want, dtype) = (reference.reports.first()?.loss, job.plan.policy.param_dtype);
    let distance = match &reference.rounding {
        Some(found) => tolerance(found.loss, want.abs(), dtype),
        None if Promise::of(&job.config) == Promise::Near => return None,
        None => 0.0,
    };
    let is_near = (got - want).abs() <= distance;
    (!is_near).then(|| format!("the first loss is {got}, not {want}"))
}
