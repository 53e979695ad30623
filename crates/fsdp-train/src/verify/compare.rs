//! Compares the results of the ranks of a world with the oracle.

use fsdp_core::Axis;
use fsdp_core::comm::Traffic;
use fsdp_core::engine::{Origin, StepReport};
use fsdp_core::memory::{Category, Usage};
use fsdp_core::model::ModelSpec;
use fsdp_core::update::RuleDecl;
use fsdp_core::update::RuleState;
use fsdp_nn::Backend;
use fsdp_nn::model::Architecture;

use super::bound;
use super::closed_form::{exchanges, expected_loading_traffic, expected_traffic};
use super::coverage;
use super::promise::Promise;
use super::report::{Difference, MemoryLine, TrafficLine, WorldReport};
use super::snapshot::{Pieces, Snapshot};
use super::{RankRun, Reference};
use crate::error::TrainError;
use crate::job::Job;
use crate::rule;
use crate::shard_runs::Kind;

/// Creates the report of one world size.
pub(super) fn world<M: Backend, A: Architecture + Clone>(
    job: &Job<A>,
    reference: &Reference,
    ranks: &[RankRun],
    steps: u64,
) -> Result<WorldReport, TrainError> {
    let (plan, spec) = (&job.plan, &job.plan.spec);
    let promise = Promise::of(&job.config);
    let rule = rule::rule(&job.config.train, spec)?.declare(plan.policy.param_dtype.master());
    let largest = |value: fn(&StepReport) -> f64| {
        let pairs = ranks[0].reports.iter().zip(&reference.reports);
        pairs.map(|(got, want)| (value(got) - value(want)).abs()).fold(0.0, f64::max)
    };
    let in_first = |is_compared: fn(Kind) -> bool| {
        difference(spec, &reference.first, ranks.iter().map(|run| &run.first), is_compared)
    };
    let in_last = |is_compared: fn(Kind) -> bool| {
        difference(spec, &reference.last, ranks.iter().map(|run| &run.last), is_compared)
    };
    let mut report = WorldReport {
        world: plan.mesh.world(),
        replicas: plan.mesh.size(Axis::Replicate),
        shards: plan.mesh.size(Axis::Shard),
        context: plan.mesh.size(Axis::Context),
        expert: plan.mesh.expert(),
        promise: promise.name(),
        losses: ranks[0].reports.iter().map(|report| report.loss).collect(),
        loss_difference: largest(|report| report.loss),
        norm_difference: largest(|report| report.grad_norm),
        params: in_last(|kind| kind == Kind::Param),
        gradients: in_first(|kind| kind == Kind::Gradient),
        states: in_last(|kind| matches!(kind, Kind::State(_))),
        traffic: traffic_lines(job, ranks, steps, &rule)?,
        memory: memory_lines::<M, A>(job, ranks)?,
        failures: disagreements(ranks),
    };
    let mut failures = gaps(job, reference, ranks);
    failures.extend(match promise {
        Promise::Bits => bit_differences(&report),
        Promise::Bounds | Promise::Near => bound::violations(job, reference, ranks),
    });
    if let Some(got) = ranks[0].reports.first() {
        failures.extend(bound::first_loss(job, got.loss, reference));
    }
    if let (Some(got), Some(want)) = (ranks[0].reports.first(), reference.reports.first())
        && (&got.sums, &got.counts) != (&want.sums, &want.counts)
    {
        failures.push("in the first step, parts of the loss or tokens per expert differ".into());
    }
    failures.extend(skipped(promise, &reference.reports, &ranks[0].reports));
    failures.extend(unexpected_traffic(&report.traffic));
    failures.extend(unpredicted_memory(&report.memory));
    report.failures.extend(failures);
    Ok(report)
}

/// Describes collectives that differ from the closed form.
fn unexpected_traffic(lines: &[TrafficLine]) -> impl Iterator<Item = String> {
    let unexpected =
        lines.iter().filter(|line| (line.calls, line.bytes) != (line.expected_calls, line.expected_bytes));
    unexpected.map(|line| {
        let TrafficLine { collective, calls, expected_calls, bytes, expected_bytes } = line;
        format!("{collective}: {calls} calls of {bytes} bytes, not {expected_calls} of {expected_bytes}")
    })
}

/// Describes memory that differs from the ledger's prediction.
fn unpredicted_memory(lines: &[MemoryLine]) -> impl Iterator<Item = String> {
    lines.iter().filter(|line| line.predicted_bytes != line.counted_bytes).map(|line| {
        let MemoryLine { place, category, predicted_bytes, counted_bytes } = line;
        let of = if *place == "host" { "host " } else { "" };
        format!("{of}{category}: {counted_bytes} bytes counted, {predicted_bytes} predicted")
    })
}

/// The bits of a report, so that NaN equals itself.
fn bits(report: &StepReport) -> (u64, u64, u64, bool) {
    let StepReport { loss, targets, grad_norm, finite, .. } = *report;
    (loss.to_bits(), targets, grad_norm.to_bits(), finite)
}

/// Describes steps that only the oracle or only the ranks skipped because of overflow; also if all steps were skipped.
/// Unless bits are promised, steps after the first applied one are not compared.
fn skipped(promise: Promise, want: &[StepReport], got: &[StepReport]) -> Vec<String> {
    let first = want.iter().position(|report| report.finite);
    let judged = first.filter(|_| promise != Promise::Bits).map_or(want.len(), |first| first + 1);
    let steps = want.iter().zip(got).zip(1..).take(judged);
    let differ = steps.filter(|((want, got), _)| want.finite != got.finite);
    let mut failures: Vec<String> = differ
        .map(|(_, step)| format!("step {step} is skipped only by the oracle or only by the ranks"))
        .collect();
    if !want.is_empty() && first.is_none() {
        failures.push("all steps are skipped: run more, or lower train.loss_scale.init".to_owned());
    }
    failures
}

/// Describes disagreements between ranks, which are errors regardless of the oracle.
fn disagreements(ranks: &[RankRun]) -> Vec<String> {
    let mut failures = Vec::new();
    for (rank, run) in ranks.iter().enumerate() {
        if !run.reports.iter().map(bits).eq(ranks[0].reports.iter().map(bits)) {
            failures.push(format!("rank {rank} reports different losses or norms than rank 0"));
        }
        failures.extend(growth(&run.settled, &run.usage).map(|what| format!("rank {rank}: {what}")));
    }
    failures
}

/// Describes values that a replica lacks, and replicas that differ.
fn gaps<A>(job: &Job<A>, reference: &Reference, ranks: &[RankRun]) -> Vec<String> {
    let (spec, mesh) = (&job.plan.spec, job.plan.mesh);
    let first: Vec<&Pieces> = ranks.iter().map(|run| &run.first).collect();
    let last: Vec<&Pieces> = ranks.iter().map(|run| &run.last).collect();
    let gradients = coverage::expected(&reference.first, |kind| kind == Kind::Gradient);
    let others = coverage::expected(&reference.last, |kind| kind != Kind::Gradient);
    let mut failures = coverage::gaps(spec, mesh, &gradients, &first);
    failures.extend(coverage::gaps(spec, mesh, &others, &last));
    failures.extend(coverage::unequal_replicas(mesh, &last));
    failures
}

/// Describes values that differ from the oracle's in bits.
fn bit_differences(report: &WorldReport) -> Vec<String> {
    let values = [
        ("parameters", &report.params),
        ("gradients", &report.gradients),
        ("optimizer state", &report.states),
    ];
    let differ = values.into_iter().filter(|(_, difference)| difference.differing > 0);
    let mut failures: Vec<String> = differ
        .map(|(what, difference)| format!("{} elements of {what} differ in bits", difference.differing))
        .collect();
    if report.loss_difference != 0.0 || report.norm_difference != 0.0 {
        failures.push("losses or gradient norms differ in bits".into());
    }
    failures
}

/// Describes memory that a rank needs in addition after the last step, compared with the first. Buffers are compared,
/// not their storage in the pool: its requests depend on which collectives overlap.
fn growth(first: &Usage, last: &Usage) -> impl Iterator<Item = String> {
    Category::ALL.into_iter().flat_map(move |category| {
        let pairs = [
            ("live", first.live(category), last.live(category)),
            ("peak", first.peak(category), last.peak(category)),
            ("live host", first.host.live(category), last.host.live(category)),
            ("peak host", first.host.peak(category), last.host.peak(category)),
        ];
        pairs.into_iter().filter(|(_, first, last)| first != last).map(move |(what, first, last)| {
            format!("{what} {category} were {first} bytes after the first step, {last} after the last")
        })
    })
}

/// The largest difference of values of a kind. [`coverage`] checks that all of them are held.
fn difference<'a>(
    spec: &ModelSpec,
    reference: &Snapshot,
    ranks: impl Iterator<Item = &'a Pieces>,
    is_compared: fn(Kind) -> bool,
) -> Difference {
    let mut result = Difference::default();
    for pieces in ranks {
        for held in pieces.values.iter().filter(|held| is_compared(held.kind)) {
            let reference_values = match held.kind {
                Kind::Param => Some(&reference.params[held.param.0]),
                Kind::Gradient => reference.gradients[held.param.0].as_ref(),
                Kind::State(index) => reference.states[held.param.0].get(index),
            };
            let Some(reference_values) = reference_values else { continue };
            let expected = &reference_values[held.first..held.first + held.values.len()];
            for (index, (got, want)) in held.values.iter().zip(expected).enumerate() {
                result.compared += 1;
                if got.to_bits() == want.to_bits() {
                    continue;
                }
                result.differing += 1;
                let distance = (got - want).abs();
                if result.param.is_none() || distance > result.largest || distance.is_nan() {
                    result.largest = distance;
                    result.param = Some(spec.param(held.param).fqn.clone());
                    result.element = held.first + index;
                }
            }
        }
    }
    result
}

fn traffic_lines<A: Architecture + Clone>(
    job: &Job<A>,
    ranks: &[RankRun],
    steps: u64,
    rule: &RuleDecl,
) -> Result<Vec<TrafficLine>, TrainError> {
    let mut got = Traffic::default();
    let mut want = Traffic::default();
    let exchanges = exchanges(job)?;
    for run in ranks {
        got += run.traffic;
        if job.init.origin() == Origin::Read {
            want += expected_loading_traffic(&job.plan);
        }
        for _ in 0..steps {
            want += expected_traffic(&job.plan, rule);
            want += exchanges.fixed;
        }
    }
    let others = got.all_to_alls.saturating_sub(want.all_to_alls);
    want += exchanges.rounds(others, steps * ranks.len() as u64);
    Ok(TrafficLine::of(got, want))
}

fn memory_lines<M: Backend, A: Architecture + Clone>(
    job: &Job<A>,
    ranks: &[RankRun],
) -> Result<Vec<MemoryLine>, TrainError> {
    let mut lines: Vec<MemoryLine> = Vec::new();
    for (rank, run) in ranks.iter().enumerate() {
        let predicted: Usage = job.predict::<M>(fsdp_core::Rank(rank))?;
        let rank_lines = MemoryLine::all(&predicted, &run.usage);
        if lines.is_empty() {
            lines = rank_lines;
            continue;
        }
        for (line, rank_line) in lines.iter_mut().zip(rank_lines) {
            // Show the worst rank; one whose prediction fails is worse than any that fits.
            let fails = rank_line.predicted_bytes != rank_line.counted_bytes;
            if fails
                || (line.predicted_bytes == line.counted_bytes
                    && rank_line.counted_bytes > line.counted_bytes)
            {
                *line = rank_line;
            }
        }
    }
    Ok(lines)
}
