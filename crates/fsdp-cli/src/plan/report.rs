//! The prediction of a run, for people.

use std::collections::BTreeMap;

use fsdp_core::Queue;
use fsdp_core::plan::Plan;
use fsdp_core::schedule::Op;
use fsdp_plan::Constants;
use fsdp_plan::band::LARGE_WORLD;
use fsdp_plan::stand_in;

use serde_json::Value;

use super::ahead::RunForecast;
use super::cost::{Cost, span};
use super::effects::Effect;
use super::outlook::Outlook;
use super::{figures, json};
use crate::document::{Document, Mark, Report};
use crate::train::{memory_rows, units_of};
use crate::units::{bytes, grouped, plural, rate};

/// Width of names.
pub(super) const WIDTH: usize = 28;

/// Minimum fraction of compute time extrapolated far from measurements to be reported; unmeasured operations are always
/// reported.
const FAR_REPORTED: f64 = 0.02;

/// Maximum units listed with exposed communication, and maximum effects.
const SHOWN: usize = 8;

/// Names an operation of a plan by its kind and its unit or block.
pub(super) fn name(plan: &Plan, op: &Op) -> String {
    let of = match (op.kind.block(), op.kind.unit()) {
        (Some(block), _) => plan.spec.block(block).name.as_str(),
        (None, Some(unit)) => plan.layout.units[unit.0].name.as_str(),
        (None, None) => return op.kind.name().to_owned(),
    };
    format!("{} of {of}", op.kind.name())
}

impl Report for Outlook<'_> {
    fn json(&self) -> Value {
        json::json(self)
    }

    fn write(&self, to: &mut dyn Document) {
        let Self { run, cost, effects, .. } = self;
        write_head(run, to);
        to.section("memory of a device");
        to.table(["category", "peak"], device_rows(run));
        let (mark, verdict) = match left(run) {
            Ok(left) => (Mark::Good, left),
            Err(lacking) => (Mark::Bad, lacking),
        };
        to.marked(mark, &verdict, "");
        to.section("step");
        to.pairs(WIDTH, &step_rows(self));
        to.figure(&|page| figures::draw(self, page));
        to.section("queues");
        to.table(["queue", "at work", "of the step"], queues(run));
        to.section("what computation waits for");
        write_waits(run, to);
        to.section("critical path");
        to.table(["operation", "of them", "time", "the longest"], critical_path(run));
        to.section("other settings");
        to.table(["change", "step", "memory", ""], effect_rows(run, effects));
        to.section("the whole run");
        to.pairs(WIDTH, &run_rows(cost));
        to.section("assumed");
        to.list(assumptions(run));
        to.section("where other numbers are from");
        to.list(
            sources(run).into_iter().map(|[number, value, source]| format!("{number} = {value}: {source}")),
        );
    }
}

fn write_head(run: &RunForecast<'_>, to: &mut dyn Document) {
    let (plan, config) = (&run.plan, &run.config);
    let per_node = run.cluster.devices_per_node();
    to.line(&format!(
        "{}, {} of {} x {} tokens per rank and step",
        units_of(plan),
        counted(plan.step.rounds, "micro-batch"),
        config.train.micro_batch_size,
        config.data.seq_len
    ));
    let nodes = counted(plan.mesh.world().div_ceil(per_node), "node");
    to.line(&format!("on {nodes} of {}, {}", counted(per_node, "device"), run.cluster));
}

/// A large count with its noun.
fn counted(count: usize, what: &str) -> String {
    format!("{} {}", grouped(count as u64), plural(count, what))
}

fn device_rows(run: &RunForecast<'_>) -> Vec<[String; 2]> {
    let mut rows = memory_rows(&[run.usage]);
    if run.beside_bytes() > 0 {
        rows.push(["context, workspace, NCCL (assumed)".to_owned(), bytes(run.beside_bytes())]);
    }
    rows
}

/// The memory left on a device, or the memory that it lacks.
fn left(run: &RunForecast<'_>) -> Result<String, String> {
    let (needed, available) = (run.device_bytes(), run.capacity());
    match available.checked_sub(needed) {
        Some(left) => Ok(format!("fits: {} of {} are left", bytes(left), bytes(available))),
        None => {
            Err(format!("does not fit: {} are needed, {} are available", bytes(needed), bytes(available)))
        }
    }
}

fn step_rows(Outlook { run, fsdp2, recompute_factor, .. }: &Outlook<'_>) -> Vec<[String; 2]> {
    let forecast = &run.forecast;
    let [mfu, mfu_6n] = run.utilization();
    let percent = |part: f64| format!("{:.1} %", 100.0 * part);
    let world = run.plan.mesh.world() as f64;
    let (speed, per_device) = (run.tokens_per_second(), run.tokens_per_second() / world);
    let mut rows = vec![
        ("time", step_time(run)),
        ("computing", span(forecast.computing)),
        ("waiting for communication", span(forecast.exposed)),
        ("slowest of all nodes", format!("+{:.1} %", 100.0 * (forecast.straggling - 1.0))),
        ("speed", format!("{} tokens/s, {} for each device", rate(speed), rate(per_device))),
        ("MFU", format!("{} (6 N + 12 L d T), {} (6 N)", percent(mfu), percent(mfu_6n))),
        ("HFU", format!("{} (the first, including recomputation)", percent(mfu * recompute_factor))),
    ];
    rows.extend(fsdp2.map(|[compiled, eager]| {
        let beside = format!("{} compiled, {} eager (predicted, same settings)", span(compiled), span(eager));
        ("PyTorch FSDP2", beside)
    }));
    rows.into_iter().map(|(name, value)| [name.to_owned(), value]).collect()
}

/// The time of a step with its band; the band comes first if a single number would pretend too much precision.
fn step_time(run: &RunForecast<'_>) -> String {
    let [time, low, high] = [run.forecast.seconds, run.band[0], run.band[1]];
    let band = format!("{} to {}", span(low), span(high));
    if run.plan.mesh.world() > LARGE_WORLD || high > 2.0 * low {
        return format!("{band} (what follows is for {})", span(time));
    }
    format!("{} ({band})", span(time))
}

fn queues(run: &RunForecast<'_>) -> impl Iterator<Item = [String; 3]> {
    let rows = Queue::ALL.map(|queue| (queue, run.busy(queue))).into_iter().filter(|(_, busy)| *busy > 0.0);
    let end = run.forecast.timeline.end;
    rows.map(move |(queue, busy)| {
        [queue.name().to_owned(), span(busy), format!("{:.1} %", 100.0 * busy / end)]
    })
}

/// Seconds that computation waits, by cause, the longest first.
pub(super) fn waits(run: &RunForecast<'_>) -> Vec<(String, f64)> {
    let step = &run.plan.step;
    let mut sums: BTreeMap<String, f64> = BTreeMap::new();
    for (op, seconds) in run.forecast.timeline.exposed(step) {
        *sums.entry(name(&run.plan, step.op(op))).or_default() += seconds;
    }
    let mut sums: Vec<(String, f64)> = sums.into_iter().collect();
    sums.sort_by(|one, other| other.1.total_cmp(&one.1));
    sums
}

fn write_waits(run: &RunForecast<'_>, to: &mut dyn Document) {
    let waits = waits(run);
    if waits.is_empty() {
        return to.line("nothing");
    }
    let rows = waits.iter().take(SHOWN).map(|(name, seconds)| [name.clone(), span(*seconds)]);
    to.table(["waiting for", "time"], rows);
    if let Some(more @ 1..) = waits.len().checked_sub(SHOWN) {
        to.line(&format!("and {more} more"));
    }
}

/// The operations on the critical path, by kind: their number, total seconds, and the longest one.
pub(super) fn critical_kinds(run: &RunForecast<'_>) -> Vec<(&'static str, usize, f64, String)> {
    let (step, timeline) = (&run.plan.step, &run.forecast.timeline);
    let mut kinds: BTreeMap<&'static str, (usize, f64, f64, String)> = BTreeMap::new();
    for id in timeline.critical_path() {
        let (op, span) = (step.op(id), timeline.spans[id.0]);
        let seconds = span.end - span.start;
        let kind = kinds.entry(op.kind.name()).or_default();
        (kind.0, kind.1) = (kind.0 + 1, kind.1 + seconds);
        if seconds > kind.2 || kind.3.is_empty() {
            let behind = span.behind.map(|behind| format!(", behind {}", name(&run.plan, step.op(behind))));
            (kind.2, kind.3) = (seconds, name(&run.plan, op) + &behind.unwrap_or_default());
        }
    }
    let mut kinds: Vec<_> = kinds
        .into_iter()
        .map(|(kind, (count, seconds, _, longest))| (kind, count, seconds, longest))
        .collect();
    kinds.sort_by(|one, other| other.2.total_cmp(&one.2));
    kinds
}

fn critical_path(run: &RunForecast<'_>) -> impl Iterator<Item = [String; 4]> {
    let kinds = critical_kinds(run).into_iter().filter(|kind| kind.2 > 0.0).take(SHOWN);
    kinds.map(|(kind, count, seconds, longest)| [kind.to_owned(), count.to_string(), span(seconds), longest])
}

fn effect_rows(run: &RunForecast<'_>, effects: &[Effect]) -> Vec<[String; 4]> {
    let row = |effect: &Effect| {
        let change = 100.0 * (effect.seconds / run.forecast.seconds - 1.0);
        let fits = if effect.fits { "" } else { "does not fit" };
        [effect.change.clone(), format!("{change:+.1} %"), bytes(effect.device_bytes), fits.to_owned()]
    };
    effects.iter().take(SHOWN).map(row).collect()
}

pub(super) fn run_rows(cost: &Cost) -> Vec<[String; 2]> {
    let rows = [
        ("tokens", format!("{:.3e} in {}", cost.tokens, counted(cost.steps as usize, "step"))),
        ("time", times(cost)),
        ("a failure", failures(cost)),
        ("save", saves(cost)),
        ("device hours", amount(cost.device_hours())),
        ("price", price(cost)),
    ];
    rows.map(|(name, value)| [name.to_owned(), value]).into()
}

fn price(cost: &Cost) -> String {
    let dollars = if cost.total_seconds.is_finite() {
        format!("${}", amount(cost.dollars()))
    } else {
        "without end".to_owned()
    };
    format!("{dollars} at ${} for a device and hour", cost.price)
}

fn times(cost: &Cost) -> String {
    let seconds = span(cost.seconds);
    if cost.total_seconds.is_finite() {
        format!("{seconds} of steps, {} with saves and failures", span(cost.total_seconds))
    } else {
        format!("{seconds} of steps; it never ends: failures leave no time for a restart and repeated work")
    }
}

fn failures(cost: &Cost) -> String {
    if cost.between_failures.is_finite() {
        format!("every {}, of {}", span(cost.between_failures), counted(cost.devices as usize, "device"))
    } else {
        "none: `operation.failures_per_device_year` is 0".to_owned()
    }
}

fn saves(cost: &Cost) -> String {
    let often = match (cost.is_every_given, cost.save_every.is_finite()) {
        (true, _) => format!("every {} (checkpoint.every)", span(cost.save_every)),
        (false, true) => format!("every {} (Young and Daly)", span(cost.save_every)),
        (false, false) => "only at the end, since nothing fails".to_owned(),
    };
    let waits = if cost.save_every < cost.save.write { ", for which the next one waits" } else { "" };
    format!(
        "{often}, steps stop for {}, written after {}{waits}; {:.1} % of the time is lost to saves and failures",
        span(cost.save.stop),
        span(cost.save.write),
        100.0 * cost.lost()
    )
}

/// A number of hours or dollars, rounded up unless it is small.
fn amount(number: f64) -> String {
    match number {
        _ if !number.is_finite() => "without end".to_owned(),
        _ if number < 10.0 => format!("{number:.2}"),
        _ => grouped(number.ceil() as u64),
    }
}

/// The assumptions behind a plan.
pub(super) fn assumptions(run: &RunForecast<'_>) -> Vec<String> {
    let cluster = run.cluster;
    let mut all: Vec<String> = Vec::new();
    if let Some(measured) = &cluster.measured {
        all.push(format!(
            "times are interpolated between {} points that were measured on {} ({}) at {} by version {}",
            measured.len(),
            measured.machine,
            measured.device,
            measured.date,
            measured.version
        ));
        let unmeasured = run.forecast.unmeasured.iter();
        all.extend(unmeasured.map(|(what, instead)| format!("not measured: {what}: {instead}")));
        let far = run.forecast.far.iter().filter(|(_, far)| far.is_unknown || far.part >= FAR_REPORTED);
        all.extend(far.map(|(op, far)| {
            let how =
                if far.is_unknown { "not measured: by its size" } else { "measured at other sizes only" };
            format!("{op}, {:.1} % of computing by size: {how}", 100.0 * far.part)
        }));
    } else if let Some(other) = stand_in(&cluster.generation) {
        all.push(format!(
            "{} devices are assumed to reach the same part of their peak as {other}: no run was fitted, and steps may take twice as long",
            cluster.generation
        ));
    }
    let numbers = cluster.numbers();
    let assumed = numbers.iter().filter(|(_, number)| number.source.starts_with("assumed"));
    all.extend(assumed.map(|(key, number)| format!("{key} = {:e}: {}", number.value, number.source)));
    if cluster.measured.is_none() {
        all.push("constants of prices are fitted to runs of other software (docs/planning.md); this engine has not been timed on such devices".to_owned());
    }
    all.push("a restart takes 10 minutes".to_owned());
    all
}

/// The numbers of a plan that are not assumed, with their values and sources.
pub(super) fn sources(run: &RunForecast<'_>) -> Vec<[String; 3]> {
    let numbers = run.cluster.numbers().into_iter();
    let known = numbers.filter(|(_, number)| !number.source.starts_with("assumed"));
    let mut rows: Vec<[String; 3]> =
        known.map(|(key, number)| [key, format!("{:e}", number.value), number.source.clone()]).collect();
    if run.cluster.measured.is_none() {
        let fitted = Constants::fitted().of(run.cluster);
        let source = || "fitted to published runs: crates/fsdp-plan/constants.toml".to_owned();
        rows.extend(
            fitted.into_iter().map(|(name, value)| [name.to_owned(), format!("{value:.4}"), source()]),
        );
    }
    rows
}
