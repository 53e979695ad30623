//! Measures how long the ranks of a step wait for each other.
//!
//! Each rank measures how long its collectives block it until the other ranks and their data arrive. The rank that
//! waits least is the one that the others wait for. This holds for every transport whose collectives block the host; if
//! the host runs ahead of its device, or the device runs whole compiled steps, nothing is reported.
//!
//! Ranks report after a step and outside of collectives, and nothing waits for these reports: the metrics of a step
//! contain those of an earlier one. Adding them to the all-reduce of a step's scalars would take a word per rank or
//! another all-reduce, and traffic that differs from the closed form.

use std::time::{Duration, Instant};

use fsdp_comm::assembly::Assembly;
use fsdp_core::Rank;
use fsdp_core::engine::Observer;
use fsdp_core::schedule::{OpId, OpKind};

use crate::error::TrainError;
use crate::metrics::Waiting;

/// Times how long a rank waits in the collectives of a step. An operation that needs a collective waits from the end of
/// the previous operation to the [end](Observer::end) of the collective; an operation that waits for a collective where
/// it issues it, from its own begin.
pub(crate) struct WaitTimer<'a> {
    inner: &'a mut dyn Observer,
    /// End of the last period that was not waiting.
    mark: Instant,
    waited: Duration,
}

impl<'a> WaitTimer<'a> {
    /// Starts timing a step, forwarding all calls to `inner`.
    pub(crate) fn new(inner: &'a mut dyn Observer) -> Self {
        Self { inner, mark: Instant::now(), waited: Duration::ZERO }
    }

    /// Total waiting time so far.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }

    fn add_waited(&mut self) {
        self.waited += self.mark.elapsed();
    }
}

/// Whether an operation waits for its collective where it is issued.
fn waits_inside(kind: &OpKind) -> bool {
    matches!(kind, OpKind::ReduceScalars | OpKind::ReduceStatistics(_))
}

/// Reads the clock only where necessary: a step has hundreds of operations, and on some machines reading the clock is
/// slow.
impl Observer for WaitTimer<'_> {
    fn begin(&mut self, op: OpId, kind: &OpKind) {
        self.inner.begin(op, kind);
        if waits_inside(kind) {
            self.mark = Instant::now();
        }
    }

    fn issued(&mut self, op: OpId, kind: &OpKind) {
        if waits_inside(kind) {
            self.add_waited();
        }
        self.inner.issued(op, kind);
        self.mark = Instant::now();
    }

    fn end(&mut self, op: OpId, kind: &OpKind) {
        if kind.is_collective() {
            self.add_waited();
        }
        self.inner.end(op, kind);
        if kind.is_collective() {
            self.mark = Instant::now();
        }
    }
}

/// Reports to the first rank how long `rank` has waited in `step`.
///
/// # Errors
/// Errors of communication.
pub(crate) fn report(
    assembly: &dyn Assembly,
    step: u64,
    rank: Rank,
    waited: Duration,
) -> Result<(), TrainError> {
    let nanos = u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX);
    Ok(assembly.give(&topic(step), rank, nanos.to_le_bytes().to_vec())?)
}

/// The waiting times that the first rank has received.
pub(crate) struct WaitReports {
    /// The first step (from 0) for which not all ranks have reported.
    next: u64,
}

impl WaitReports {
    /// Starts empty, for a run whose first step is `first`.
    pub(crate) fn new(first: u64) -> Self {
        Self { next: first }
    }

    /// Returns the newest step before `step` for which all ranks have reported, once. Does not wait: usually the step
    /// right before is complete by now, unless messages between processes are late.
    pub(crate) fn newest_before(&mut self, step: u64, assembly: &dyn Assembly) -> Option<Waiting> {
        let mut newest = None;
        while self.next < step && assembly.given(&topic(self.next)) == assembly.world() {
            let reports = assembly.collect(&topic(self.next), assembly.world(), Duration::ZERO).ok()?;
            let nanos = |report: Vec<u8>| u64::from_le_bytes(report.try_into().expect("a number was given"));
            let waited: Vec<Duration> = reports.into_iter().map(nanos).map(Duration::from_nanos).collect();
            self.next += 1;
            newest = Some(Waiting::of(self.next, &waited));
        }
        newest
    }
}

/// The topic of a step (from 0).
fn topic(step: u64) -> String {
    format!("waited {step}")
}

#[cfg(test)]
mod tests {
    use fsdp_comm::assembly::InMemoryAssembly;
    use fsdp_core::Group;
    use fsdp_core::comm::ReduceOp;
    use fsdp_core::wrap::UnitId;

    use super::*;

    #[test]
    fn only_time_blocked_in_collectives_counts_as_waiting() {
        let pause = || std::thread::sleep(Duration::from_millis(3));
        let gather = OpKind::ReduceScatter { unit: UnitId(0), reduce: ReduceOp::Sum, group: Group::SHARDS };
        let mut inner = ();
        let mut timer = WaitTimer::new(&mut inner);
        pause();
        timer.begin(OpId(0), &OpKind::BeginStep);
        pause();
        timer.issued(OpId(0), &OpKind::BeginStep);
        timer.end(OpId(0), &OpKind::BeginStep);
        timer.begin(OpId(1), &gather);
        pause();
        timer.issued(OpId(1), &gather);
        assert_eq!(timer.waited(), Duration::ZERO);
        pause();
        timer.end(OpId(1), &gather);
        let of_one = timer.waited();
        assert!(of_one >= Duration::from_millis(3));
        timer.begin(OpId(2), &OpKind::ReduceScalars);
        pause();
        timer.issued(OpId(2), &OpKind::ReduceScalars);
        assert!(timer.waited() >= of_one + Duration::from_millis(3));
    }

    #[test]
    fn step_is_reported_once_and_only_after_all_ranks() {
        let assembly = InMemoryAssembly::new(2);
        let give = |step, rank, ms| report(&assembly, step, Rank(rank), Duration::from_millis(ms)).unwrap();
        let mut reports = WaitReports::new(5);
        give(5, 1, 4);
        assert_eq!(reports.newest_before(6, &assembly), None);
        give(5, 0, 8);
        give(6, 0, 1);
        let of = |step, slowest_rank| Waiting { wait_step: step, slowest_rank, ..waited(8.0, 4.0) };
        assert_eq!(reports.newest_before(5, &assembly), None, "that step goes on");
        assert_eq!(reports.newest_before(6, &assembly), Some(of(6, 1)));
        assert_eq!(reports.newest_before(7, &assembly), None);
        give(6, 1, 2);
        give(7, 0, 8);
        give(7, 1, 4);
        assert_eq!(reports.newest_before(9, &assembly), Some(of(8, 1)), "an older one is passed over");
    }

    fn waited(wait_ms_max: f64, wait_ms_min: f64) -> Waiting {
        let wait_ms = f64::midpoint(wait_ms_max, wait_ms_min);
        Waiting { wait_step: 0, wait_ms, wait_ms_max, wait_ms_min, slowest_rank: 0 }
    }
}
