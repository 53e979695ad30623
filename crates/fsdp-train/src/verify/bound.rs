//! Error bounds for runs without a promise of equal bits, derived in docs/numerics.md.
//!
//! A run and the oracle add the same leaves in different orders; averaging also rounds reciprocals and products. The
//! bounds apply to the gradients of the first step that was not skipped, element by element, and to their norm.

use fsdp_core::DType;
use fsdp_core::comm::ReduceOp;
use fsdp_core::plan::Plan;

use super::{Promise, RankRun, Reference};
use crate::job::Job;
use crate::shard_runs::Kind;

/// The largest permitted distance of an element of the first gradient from the oracle's.
struct Bound {
    /// Factor of the sum of the absolute leaves.
    relative: f64,
    /// Error of products that are subnormal.
    absolute: f64,
    /// Factor of the parameter's largest sum of absolute leaves, for kernels other than the oracle's.
    kernels: f64,
}

/// Tolerance for other kernels, in rounding errors of the largest gradient of a parameter. It is chosen, not derived:
/// the kernels of XLA on CPUs stay within it for the models of the tests.
const KERNEL_ROUNDINGS: f64 = 64.0;

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
    fn of(plan: &Plan, promise: Promise) -> Self {
        let kernels = match promise {
            Promise::Near => KERNEL_ROUNDINGS * unit_roundoff(plan.policy.param_dtype),
            Promise::Bits | Promise::Bounds => 0.0,
        };
        let unit_roundoff = unit_roundoff(plan.policy.reduce_dtype);
        // The smallest positive number.
        let smallest = match plan.policy.reduce_dtype {
            DType::F64 => f64::from_bits(1),
            DType::Bf16 => 2f64.powi(-133),
            _ => f64::from(f32::from_bits(1)),
        };
        let leaves = (plan.step.rounds * plan.mesh.world()) as f64;
        let additions = (leaves - 1.0) * unit_roundoff;
        if plan.policy.reduce_op == ReduceOp::Sum {
            return Self { relative: 2.0 * additions, absolute: 0.0, kernels };
        }
        let axes = [plan.mesh.replicas(), plan.mesh.shards()];
        let inexact = axes.into_iter().filter(|axis| !axis.is_power_of_two()).count() as f64;
        let averaged = if inexact == 0.0 {
            additions
        } else {
            // The reciprocal and the product of every such axis, and the product that reverts them.
            let roundings = leaves - 1.0 + 2.0 * inexact + 1.0;
            (roundings * unit_roundoff.ln_1p()).exp_m1()
        };
        let absolute = leaves * plan.step.averaged_ranks as f64 * smallest;
        Self { relative: additions + averaged, absolute, kernels }
    }

    /// The bound of an element with sum of absolute leaves `magnitude`, whose parameter has the largest such sum
    /// `largest`.
    fn at(&self, magnitude: f64, largest: f64) -> f64 {
        self.relative * magnitude + self.absolute + self.kernels * largest
    }
}

/// Lists gradient elements outside their bounds in the first step that was not skipped, one per piece of a parameter,
/// and the norm if it is outside its bound. Empty if all steps were skipped.
pub(super) fn broken<A>(
    job: &Job<A>,
    reference: &Reference,
    ranks: &[RankRun],
    promise: Promise,
) -> Vec<String> {
    let (spec, bound) = (&job.plan.spec, Bound::of(&job.plan, promise));
    let trained: Vec<usize> = (0..spec.params.len()).filter(|&id| spec.params[id].trainable).collect();
    let mut failures = Vec::new();
    if reference.magnitudes.is_empty() {
        return failures;
    }
    for held in ranks.iter().flat_map(|run| &run.first.values).filter(|held| held.kind == Kind::Gradient) {
        let Ok(index) = trained.binary_search(&held.param.0) else { continue };
        let Some(whole) = &reference.first.gradients[held.param.0] else { continue };
        let largest = largest(&reference.magnitudes[index]);
        for (offset, got) in held.values.iter().enumerate() {
            let element = held.first + offset;
            let bound = bound.at(reference.magnitudes[index][element], largest);
            let distance = (got - whole[element]).abs();
            if distance > bound || distance.is_nan() {
                let fqn = &spec.param(held.param).fqn;
                failures
                    .push(format!("gradient of {fqn}[{element}] is off by {distance:e}, bound {bound:e}"));
                break;
            }
        }
    }
    failures.extend(norm(job, reference, ranks, &bound));
    failures
}

fn largest(magnitudes: &[f64]) -> f64 {
    magnitudes.iter().copied().fold(0.0, f64::max)
}

/// The sum of the squared bounds of a parameter.
fn squares_of(bound: &Bound, magnitudes: &[f64]) -> f64 {
    let largest = largest(magnitudes);
    magnitudes.iter().map(|&magnitude| bound.at(magnitude, largest).powi(2)).sum()
}

/// Describes the first gradient norm if it is outside its bound: norms differ by at most the norm of the difference.
fn norm<A>(job: &Job<A>, reference: &Reference, ranks: &[RankRun], bound: &Bound) -> Option<String> {
    let first = reference.reports.iter().position(|report| report.finite)?;
    let (got, want) = (ranks[0].reports.get(first)?, &reference.reports[first]);
    let squares: f64 = reference.magnitudes.iter().map(|all| squares_of(bound, all)).sum();
    let longest = job.plan.spec.params.iter().map(|param| param.row_len().unwrap_or(1)).max()?;
    // Both norms are computed in double precision: sums of squares of rows, a root, and the factor of the mean.
    let computed = (longest as f64 + 8.0) * 2f64.powi(-53) * want.grad_norm;
    let elements = reference.magnitudes.iter().map(Vec::len).sum::<usize>() as f64;
    let bound = squares.sqrt() * (1.0 + elements * 2f64.powi(-53)) / (got.targets.max(1) as f64) + computed;
    let distance = (got.grad_norm - want.grad_norm).abs();
    (distance > bound || distance.is_nan())
        .then(|| format!("the first gradient norm is off by {distance:e}, bound {bound:e}"))
}

/// Describes the first loss if it differs from the oracle's, or, under [`Promise::Near`], is not near it.
pub(super) fn first_loss<A>(job: &Job<A>, got: f64, want: f64, promise: Promise) -> Option<String> {
    let distance = match promise {
        Promise::Near => KERNEL_ROUNDINGS * unit_roundoff(job.plan.policy.param_dtype) * want.abs(),
        Promise::Bits | Promise::Bounds => 0.0,
    };
    let is_near = (got - want).abs() <= distance;
    (!is_near).then(|| format!("the first loss is {got}, not {want}"))
}
