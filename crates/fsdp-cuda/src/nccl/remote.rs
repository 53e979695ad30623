//! The call table across processes.
//!
//! At least once a second, every process reports the progress of its ranks to the leader: for each NCCL communicator,
//! the number of calls and a digest of them. The leader [judges](judge()) the reports of all processes for the same
//! beat. The calls themselves are sent only when a rank waits, because NCCL may hang on them, or when digests of the
//! same number of calls differ, which NCCL does not notice: then the leader asks, and every process reports the calls
//! kept for that communicator.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fsdp_comm::assembly::{Assembly, AssemblyError};
use fsdp_comm::rendezvous::{Failure, Report, Ruling, judge};
use fsdp_comm::{Alarm, FlightRecorder};
use fsdp_core::Rank;
use fsdp_core::comm::CommError;

use super::world::{State, World};
use crate::device::DeviceMemory;

/// The other processes of a world, as the ranks of this process reach them.
#[derive(Clone)]
pub struct Peers {
    /// The assembly of all ranks.
    pub assembly: Arc<dyn Assembly>,
    /// The alarm: reports failures, and learns of them.
    pub alarm: Arc<dyn Alarm>,
    /// Records the last collectives, for diagnosis after a failure.
    pub recorder: Arc<FlightRecorder>,
    /// Number of ranks on this machine, over all its processes.
    pub ranks_on_machine: usize,
    /// Heartbeat interval of the control plane.
    pub heartbeat: Duration,
}

/// Maximum interval between reports, even if heartbeats are less frequent: a world ends with a report.
const BEAT_MAX: Duration = Duration::from_secs(1);

/// Number of beats after which an unfinished call is reported.
const PATIENCE_BEATS: u32 = 2;

/// An NCCL error about other ranks may be the consequence of a process's death, which is known within this many
/// heartbeats.
const VERDICT_HEARTBEATS: u32 = 3;

/// A leader that is overdue with a judgment by this many beats counts as stuck.
const LEADER_LATE_BEATS: u32 = 20;

impl Peers {
    fn beat(&self) -> Duration {
        self.heartbeat.min(BEAT_MAX)
    }

    /// The error that has ended the world, if it becomes known within the time in which a death is noticed.
    pub(super) fn wait_for_verdict(&self) -> Option<CommError> {
        let begin = Instant::now();
        loop {
            let raised = self.alarm.raised();
            if raised.is_some() || begin.elapsed() >= self.heartbeat * VERDICT_HEARTBEATS {
                return raised;
            }
            std::thread::sleep(super::watch::PAUSE);
        }
    }
}

/// Topic announced by the leader: all processes have returned.
const OVER_TOPIC: &str = "over";
/// Topic announced by the leader: every process must report all kept calls of a line, given by the numbers of its path.
const ASK_TOPIC: &str = "ask";

/// The watcher's part in a world of several processes.
pub(super) struct HeartbeatReporter<'a, M: DeviceMemory> {
    world: &'a World<M>,
    peers: Peers,
    /// Number of the next report.
    next: u64,
    due: Instant,
    /// On the leader: number of the next report to judge, and since when.
    judging: (u64, Instant),
    /// Whether the return of all ranks of this process was reported.
    has_reported_end: bool,
    is_over: bool,
}

impl<'a, M: DeviceMemory> HeartbeatReporter<'a, M> {
    pub(super) fn new(world: &'a World<M>, peers: Peers) -> Self {
        let now = Instant::now();
        Self { world, peers, next: 0, due: now, judging: (0, now), has_reported_end: false, is_over: false }
    }

    /// Whether nothing more needs to be reported: all ranks of all processes have returned, or the world has failed.
    pub(super) fn is_finished(&self, state: &State<M>) -> bool {
        self.is_over || state.rendezvous.failure().is_some()
    }

    /// Receives, sends and judges what is due.
    pub(super) fn tick(&mut self) {
        if let Some(error) = self.peers.alarm.raised() {
            self.world.fail_from_peer(&error);
        }
        let state = self.world.lock();
        let (is_finished, is_end) = (self.is_finished(&state), state.stopping);
        drop(state);
        if is_finished {
            return;
        }
        let assembly = &self.world.assembly;
        self.is_over = assembly.hear(OVER_TOPIC, Duration::ZERO).is_ok();
        // Missed beats are made up for: all processes must count alike.
        if Instant::now() >= self.due {
            self.send_report();
            self.due += self.peers.beat();
        }
        // A final report, at once: usually all processes end at the same time.
        if is_end && !self.has_reported_end {
            self.send_report();
            self.has_reported_end = true;
        }
        if assembly.is_leader() {
            self.judge();
        } else if let Some((rank, call)) = self.world.overdue_call(self.peers.beat() * LEADER_LATE_BEATS) {
            let waited = (self.world.limit() + self.peers.beat() * LEADER_LATE_BEATS).as_secs();
            let reason =
                format!("{rank} has waited {waited} s in {call}; the leader has not reported for which rank");
            self.world.fail(Failure::of_rank(Rank(0), reason));
        }
    }

    /// Sends one report, given by the first rank of this process; the other ranks give empty values, so that all are
    /// counted.
    fn send_report(&mut self) {
        let requested_path = self.world.assembly.hear(ASK_TOPIC, Duration::ZERO).ok();
        let requested_path: Option<Vec<u64>> = requested_path.map(|path| {
            let (numbers, _) = path.as_chunks();
            numbers.iter().map(|&number| u64::from_le_bytes(number)).collect()
        });
        let report = self.world.report(self.peers.beat() * PATIENCE_BEATS, requested_path.as_deref());
        let mut report = Some(report.encode());
        let topic = topic(self.next);
        for rank in self.world.assembly.local() {
            // If the leader is unreachable there is a verdict, which arrives through the alarm.
            let _ = self.world.assembly.give(&topic, Rank(rank), report.take().unwrap_or_default());
        }
        self.next += 1;
    }

    fn judge(&mut self) {
        let (number, since) = self.judging;
        let patience = self.world.limit() + self.peers.beat() * PATIENCE_BEATS;
        match self.world.assembly.collect(&topic(number), self.world.assembly.world(), Duration::ZERO) {
            Ok(reports) => {
                self.judging = (number + 1, Instant::now());
                self.announce_ruling(&reports);
            }
            Err(AssemblyError::Late { ranks, .. }) if since.elapsed() >= patience => {
                let (rank, late) = (ranks[0], since.elapsed().as_secs());
                let reason = format!("its process has not reported its collectives for {late} s");
                self.world.fail(Failure::of_rank(rank, reason));
            }
            // Some reports are missing; if they never arrive, the alarm tells why.
            Err(_) => {}
        }
    }

    fn announce_ruling(&mut self, reports: &[Vec<u8>]) {
        let non_empty = reports.iter().enumerate().filter(|(_, report)| !report.is_empty());
        let reports: Result<Vec<Report>, Failure> =
            non_empty.map(|(rank, report)| decode(Rank(rank), report)).collect();
        let ruling = match reports {
            Ok(reports) => judge(&reports, self.world.assembly.world(), self.world.limit()),
            Err(failure) => Ruling::Failed(failure),
        };
        // If an announcement fails, there is a verdict already.
        let announce = |topic, value| drop(self.world.assembly.announce(topic, value));
        match ruling {
            Ruling::Fine => {}
            Ruling::Ask(path) => announce(ASK_TOPIC, path.into_iter().flat_map(u64::to_le_bytes).collect()),
            Ruling::Over => announce(OVER_TOPIC, Vec::new()),
            Ruling::Failed(failure) => self.world.fail(failure),
        }
    }
}

fn topic(number: u64) -> String {
    format!("beat {number}")
}

fn decode(rank: Rank, report: &[u8]) -> Result<Report, Failure> {
    Report::decode(report).map_err(|error| {
        let reason = format!("cannot decode its process's report of collectives: {error}");
        Failure { culprit: rank, error: CommError::Transport { rank, reason } }
    })
}
