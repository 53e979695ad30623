//! The table across processes.
//!
//! Once a second or more often every process tells the leader how far its ranks are: for each NCCL communicator the number of
//! calls and a digest of them. The leader [judges](judge()) what all have told at the same beat. Calls themselves travel
//! only when somebody waits, which is when NCCL may hang because of them, or when digests of as many calls differ, which NCCL
//! does not notice: then the leader asks, and everybody tells what is kept of that communicator.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fsdp_comm::assembly::{Assembly, AssemblyError};
use fsdp_comm::rendezvous::{Failure, Report, Ruling, judge};
use fsdp_comm::{Alarm, FlightRecorder};
use fsdp_core::Rank;
use fsdp_core::comm::CommError;

use super::world::{State, World};
use crate::device::DeviceMemory;

/// The other processes of a world, as the ranks of this one reach them.
#[derive(Clone)]
pub struct Peers {
    /// Where all ranks come together.
    pub assembly: Arc<dyn Assembly>,
    /// Where failures are told and heard.
    pub alarm: Arc<dyn Alarm>,
    /// What is asked after a failure for the last collectives.
    pub recorder: Arc<FlightRecorder>,
    /// Ranks on this machine, of all its processes.
    pub ranks_on_machine: usize,
    /// How often processes tell that they are there.
    pub heartbeat: Duration,
}

/// How often a process tells of its calls at least, also where signs of life are rare: a world ends with such a beat.
const BEAT_MAX: Duration = Duration::from_secs(1);

/// Whoever is in a call for so many beats tells of it.
const PATIENCE: u32 = 2;

/// What NCCL says of others may be the consequence of a death, which processes hear of in so many heartbeats.
const HOLD: u32 = 3;

/// A leader that has not judged for so many beats longer than it should never will.
const LEADER_LATE: u32 = 20;

impl Peers {
    fn beat(&self) -> Duration {
        self.heartbeat.min(BEAT_MAX)
    }

    /// What has ended the world, as far as it is known within the time in which a death is heard of.
    pub(super) fn verdict_soon(&self) -> Option<CommError> {
        let begin = Instant::now();
        loop {
            let raised = self.alarm.raised();
            if raised.is_some() || begin.elapsed() >= self.heartbeat * HOLD {
                return raised;
            }
            std::thread::sleep(super::watch::PAUSE);
        }
    }
}

/// All processes have returned. Announced by the leader.
const OVER: &str = "over";
/// Everybody is to tell all calls of a line, which is named by the numbers of its path. Announced by the leader.
const ASK: &str = "ask";

/// What the watcher of a process does for the world.
pub(super) struct Beats<'a, M: DeviceMemory> {
    world: &'a World<M>,
    peers: Peers,
    /// The next report.
    next: u64,
    due: Instant,
    /// The next one to judge, and since when. On the leader.
    judging: (u64, Instant),
    /// Whether it was told that all ranks of this process have returned.
    has_told_end: bool,
    is_over: bool,
}

impl<'a, M: DeviceMemory> Beats<'a, M> {
    pub(super) fn new(world: &'a World<M>, peers: Peers) -> Self {
        let now = Instant::now();
        Self { world, peers, next: 0, due: now, judging: (0, now), has_told_end: false, is_over: false }
    }

    /// Whether nothing more has to be told: all ranks of all processes have returned, or the world has failed.
    pub(super) fn are_over(&self, state: &State<M>) -> bool {
        self.is_over || state.rendezvous.failure().is_some()
    }

    /// Hears, tells and judges what is due.
    pub(super) fn turn(&mut self) {
        if let Some(error) = self.peers.alarm.raised() {
            self.world.hear(&error);
        }
        let state = self.world.lock();
        let (are_over, is_end) = (self.are_over(&state), state.stopping);
        drop(state);
        if are_over {
            return;
        }
        let assembly = &self.world.assembly;
        self.is_over = assembly.hear(OVER, Duration::ZERO).is_ok();
        // Beats that were missed are made up for: all processes count alike.
        if Instant::now() >= self.due {
            self.tell();
            self.due += self.peers.beat();
        }
        // Once more at the end, at once: mostly all are there together.
        if is_end && !self.has_told_end {
            self.tell();
            self.has_told_end = true;
        }
        if assembly.is_leader() {
            self.judge();
        } else if let Some((rank, call)) = self.world.waits_for(self.peers.beat() * LEADER_LATE) {
            let waited = (self.world.limit() + self.peers.beat() * LEADER_LATE).as_secs();
            let reason =
                format!("{rank} has waited {waited} s in {call}, and its process has not said for whom");
            self.world.fail(Failure::of_rank(Rank(0), reason));
        }
    }

    /// One report, which the first rank of this process gives; the others give nothing, so that all are counted.
    fn tell(&mut self) {
        let asked = self.world.assembly.hear(ASK, Duration::ZERO).ok();
        let asked: Option<Vec<u64>> = asked.map(|path| {
            let (numbers, _) = path.as_chunks();
            numbers.iter().map(|&number| u64::from_le_bytes(number)).collect()
        });
        let report = self.world.report(self.peers.beat() * PATIENCE, asked.as_deref());
        let mut report = Some(report.encode());
        let topic = topic(self.next);
        for rank in self.world.assembly.local() {
            // A leader that can not be reached any more is a verdict, which comes by the alarm.
            let _ = self.world.assembly.give(&topic, Rank(rank), report.take().unwrap_or_default());
        }
        self.next += 1;
    }

    fn judge(&mut self) {
        let (number, since) = self.judging;
        let patience = self.world.limit() + self.peers.beat() * PATIENCE;
        match self.world.assembly.collect(&topic(number), self.world.assembly.world(), Duration::ZERO) {
            Ok(reports) => {
                self.judging = (number + 1, Instant::now());
                self.rule(&reports);
            }
            Err(AssemblyError::Late { ranks, .. }) if since.elapsed() >= patience => {
                let (rank, late) = (ranks[0], since.elapsed().as_secs());
                let reason = format!("its process has told nothing of its collectives for {late} s");
                self.world.fail(Failure::of_rank(rank, reason));
            }
            // Not all are there, or the alarm says why they will never be.
            Err(_) => {}
        }
    }

    fn rule(&mut self, reports: &[Vec<u8>]) {
        let told = reports.iter().enumerate().filter(|(_, report)| !report.is_empty());
        let reports: Result<Vec<Report>, Failure> =
            told.map(|(rank, report)| decode(Rank(rank), report)).collect();
        let ruling = match reports {
            Ok(reports) => judge(&reports, self.world.assembly.world(), self.world.limit()),
            Err(failure) => Ruling::Failed(failure),
        };
        // Who can not be told any more has a verdict.
        let announce = |topic, value| drop(self.world.assembly.announce(topic, value));
        match ruling {
            Ruling::Fine => {}
            Ruling::Ask(path) => announce(ASK, path.into_iter().flat_map(u64::to_le_bytes).collect()),
            Ruling::Over => announce(OVER, Vec::new()),
            Ruling::Failed(failure) => self.world.fail(failure),
        }
    }
}

fn topic(number: u64) -> String {
    format!("beat {number}")
}

fn decode(rank: Rank, report: &[u8]) -> Result<Report, Failure> {
    Report::decode(report).map_err(|error| {
        let reason = format!("what its process tells of its collectives can not be read: {error}");
        Failure { culprit: rank, error: CommError::Transport { rank, reason } }
    })
}
