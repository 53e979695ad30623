//! Virtual time: when each operation of a schedule would begin and end, without running it.
//!
//! A discrete-event simulation of one rank that represents all. The host issues operations in program order, each queue
//! runs its own one after the other, and an operation begins when those that it waits for have ended. Collectives need
//! no matching, because all ranks run the same schedule. Concurrent operations slow each other down: operations on one
//! [link](Work::link) share it, and collectives take a part of concurrent computation ([`Work::drag`]). Between two
//! events all rates are constant, so times are exact up to rounding.
//!
//! Differences between ranks (jitter, stragglers) are a factor on the result, [`straggling`]: a step takes as long as
//! on the slowest rank.

use std::collections::BTreeMap;

use fsdp_core::Queue;
use fsdp_core::schedule::{OpId, Schedule};

/// The cost of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Duration in seconds when nothing runs concurrently.
    pub seconds: f64,
    /// Number of the link that it occupies; `None` for none. Concurrent operations on one link share it evenly.
    pub link: Option<usize>,
    /// The fraction of each second that concurrent computation loses to this operation, from 0 to 1.
    pub drag: f64,
}

/// How operations are issued and run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pace {
    /// Seconds that the host takes to issue an operation.
    pub issue_seconds: f64,
    /// Whether operations run on the thread that issues them, one after the other, as they do on the host.
    pub is_serial: bool,
}

/// The lowest rate of computation, however many collectives run concurrently.
const MIN_RATE: f64 = 0.05;

/// The time in which an operation ran.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Span {
    /// Start, in seconds from the start of the step.
    pub start: f64,
    /// End, in seconds from the start of the step.
    pub end: f64,
    /// The operation whose end let it begin; `None` if it began when it was issued.
    pub behind: Option<OpId>,
}

/// The timing of a step in virtual time.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// The time of each operation, in program order.
    pub spans: Vec<Span>,
    /// End of the last operation, in seconds.
    pub end: f64,
}

/// Number of queues.
const QUEUES: usize = Queue::ALL.len();

/// The operations of a queue.
#[derive(Default)]
struct Lane {
    /// Operations, in program order.
    ops: Vec<usize>,
    /// The next operation to begin.
    next: usize,
    /// The current operation, and its remaining seconds if nothing ran concurrently.
    running: Option<(usize, f64)>,
}

/// Simulates a schedule whose operations cost `work`, in program order.
///
/// # Panics
/// When `work` does not have one value per operation, or operations wait for each other, which the schedule checker
/// would reject.
pub fn simulate(schedule: &Schedule, work: &[Work], pace: Pace) -> Timeline {
    assert_eq!(work.len(), schedule.ops.len(), "one value for each operation");
    let mut lanes: [Lane; QUEUES] = Default::default();
    for (op, declared) in schedule.ops.iter().enumerate() {
        let queue = if pace.is_serial { Queue::Compute } else { declared.kind.queue() };
        lanes[queue as usize].ops.push(op);
    }
    let mut spans = vec![Span { start: f64::INFINITY, end: f64::INFINITY, behind: None }; work.len()];
    let (mut now, mut unfinished) = (0.0, work.len());
    while unfinished > 0 {
        // Seconds until the next event.
        let mut step = f64::INFINITY;
        for lane in &mut lanes {
            step = step.min(begin(schedule, work, pace, lane, &mut spans, now) - now);
        }
        let rates = rates(&lanes, work);
        for (lane, rate) in lanes.iter().zip(rates) {
            step = step.min(lane.running.map_or(f64::INFINITY, |(_, remaining)| remaining / rate));
        }
        assert!(step.is_finite(), "operations wait for each other");
        now += step;
        for (lane, rate) in lanes.iter_mut().zip(rates) {
            let Some((op, remaining)) = &mut lane.running else { continue };
            // Operations that would end within rounding error of this moment end now.
            if *remaining <= step * rate * (1.0 + 1e-12) + 1e-15 {
                spans[*op].end = now;
                (lane.running, unfinished) = (None, unfinished - 1);
            } else {
                *remaining -= step * rate;
            }
        }
    }
    Timeline { spans, end: now }
}

/// Begins the next operation of a queue if the queue is idle and all waits are met. Returns the time at which the
/// operation is issued if that is all it waits for, otherwise infinity.
fn begin(
    schedule: &Schedule,
    work: &[Work],
    pace: Pace,
    lane: &mut Lane,
    spans: &mut [Span],
    now: f64,
) -> f64 {
    let Some(&op) = lane.ops.get(lane.next).filter(|_| lane.running.is_none()) else { return f64::INFINITY };
    let waits = &schedule.ops[op].waits;
    if waits.iter().any(|wait| spans[wait.0].end > now) {
        return f64::INFINITY;
    }
    let issued = (op + 1) as f64 * pace.issue_seconds;
    if !pace.is_serial && issued > now {
        return issued;
    }
    let before = lane.next.checked_sub(1).map(|before| OpId(lane.ops[before]));
    let all = waits.iter().copied().chain(before);
    let last = all.max_by(|one, other| spans[one.0].end.total_cmp(&spans[other.0].end));
    let behind = last.filter(|last| spans[last.0].end >= now);
    spans[op] = Span { start: now, end: f64::INFINITY, behind };
    let issue = if pace.is_serial { pace.issue_seconds } else { 0.0 };
    lane.running = Some((op, work[op].seconds + issue));
    lane.next += 1;
    f64::INFINITY
}

/// The rate of the running operation of each queue: the fraction of full speed at which it progresses.
fn rates(lanes: &[Lane; QUEUES], work: &[Work]) -> [f64; QUEUES] {
    let running = |queue: usize| lanes[queue].running.map(|(op, _)| &work[op]);
    let concurrent = (0..QUEUES).filter(|&queue| queue != Queue::Compute as usize).filter_map(running);
    let drag: f64 = concurrent.map(|work| work.drag).sum();
    std::array::from_fn(|queue| {
        let Some(current) = running(queue) else { return 1.0 };
        let on_link = |other: &usize| running(*other).is_some_and(|other| other.link == current.link);
        let sharing = if current.link.is_some() { (0..QUEUES).filter(on_link).count() } else { 1 };
        let speed = if queue == Queue::Compute as usize { (1.0 - drag).max(MIN_RATE) } else { 1.0 };
        speed / sharing as f64
    })
}

/// Returns the factor by which a step of `members` ranks is longer than a step of one, if their durations have a
/// standard deviation of `deviation` (a fraction of the step): the expected largest of that many normal values, by
/// Blom's approximation of its quantile.
pub fn straggling(members: usize, deviation: f64) -> f64 {
    if members < 2 {
        return 1.0;
    }
    let n = members as f64;
    1.0 + deviation * normal_quantile((n - 0.375) / (n + 0.25))
}

/// The quantile of the standard normal distribution at `p`, for `p` above one half: Abramowitz and Stegun, 26.2.23,
/// with an error below 4.5e-4.
fn normal_quantile(p: f64) -> f64 {
    let t = (-2.0 * (1.0 - p).ln()).sqrt();
    let numerator = 2.515517 + t * (0.802853 + t * 0.010328);
    let denominator = 1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308));
    t - numerator / denominator
}

impl Timeline {
    /// Seconds during which a queue was running operations.
    pub fn busy(&self, schedule: &Schedule, queue: Queue) -> f64 {
        let spans = self.spans.iter().zip(&schedule.ops).filter(|(_, op)| op.kind.queue() == queue);
        // Starts from 0, so that an empty sum is not -0.
        spans.map(|(span, _)| span.end - span.start).fold(0.0, |sum, seconds| sum + seconds)
    }

    /// Seconds during which computation was idle, by the operation that ran in that time and that computation waited
    /// for, directly or indirectly. After the last computation, by the operations that ran until the end.
    pub fn exposed(&self, schedule: &Schedule) -> BTreeMap<OpId, f64> {
        let mut exposed = BTreeMap::new();
        let mut free = 0.0;
        for (span, op) in self.spans.iter().zip(&schedule.ops) {
            if op.kind.queue() == Queue::Compute {
                self.attribute(span.behind, free, &mut exposed);
                free = span.end;
            }
        }
        self.attribute(self.last().filter(|_| self.end > free), free, &mut exposed);
        exposed
    }

    /// Attributes the time since `free`: from the last operation back to the one that began before `free`.
    fn attribute(&self, last: Option<OpId>, free: f64, exposed: &mut BTreeMap<OpId, f64>) {
        let mut next = last;
        while let Some(op) = next {
            let span = self.spans[op.0];
            if span.end <= free {
                return;
            }
            *exposed.entry(op).or_default() += span.end - span.start.max(free);
            next = span.behind;
        }
    }

    /// The operations that determine the duration of the step, from first to last: each began when the one before it
    /// ended.
    pub fn critical_path(&self) -> Vec<OpId> {
        let mut path: Vec<OpId> = self.last().into_iter().collect();
        while let Some(before) = path.last().and_then(|op| self.spans[op.0].behind) {
            path.push(before);
        }
        path.reverse();
        path
    }

    fn last(&self) -> Option<OpId> {
        let ends = self.spans.iter().enumerate();
        ends.max_by(|one, other| one.1.end.total_cmp(&other.1.end)).map(|(op, _)| OpId(op))
    }
}

#[cfg(test)]
mod tests;
