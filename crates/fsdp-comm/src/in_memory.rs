//! Links within one process: a mailbox per channel and pair of ranks, under one lock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fsdp_core::Rank;
use fsdp_core::comm::CommError;

use crate::link::{Alarm, Exchanged, Header, Incoming, Link, Outgoing, place, scatter};
use crate::monitor::Monitor;

/// A message that has been sent but not received.
struct Message {
    header: Header,
    bytes: Vec<u8>,
}

#[derive(Default)]
struct State {
    /// Keyed by channel, sender and receiver.
    boxes: BTreeMap<(u64, Rank, Rank), VecDeque<Message>>,
    closed: BTreeSet<(u64, Rank)>,
    /// Bytes sent by each rank, without headers.
    sent_bytes: BTreeMap<Rank, u64>,
    alarm: Option<CommError>,
}

struct Mailboxes {
    state: Monitor<State>,
    timeout: Duration,
    /// Number of channels used, by rank.
    channels: Vec<AtomicU64>,
    /// The alarm of the larger world, if this process holds only some of its ranks.
    outer: Option<Arc<dyn Alarm>>,
}

/// How often a waiting thread polls the alarm of a larger world, which cannot wake it.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

impl Alarm for Mailboxes {
    fn raise(&self, error: CommError) {
        if let Some(outer) = &self.outer {
            outer.raise(error.clone());
        }
        self.state.lock().alarm.get_or_insert(error);
        self.state.notify();
    }

    fn raised(&self) -> Option<CommError> {
        self.outer.as_ref().map_or_else(|| self.state.lock().alarm.clone(), |outer| outer.raised())
    }
}

/// The links of a world whose ranks are threads.
#[derive(Clone)]
pub struct InMemoryLinks {
    mailboxes: Arc<Mailboxes>,
    members: Arc<[Rank]>,
}

impl InMemoryLinks {
    /// Creates links among `ranks` ranks; no receive waits longer than `timeout`.
    pub fn new(ranks: usize, timeout: Duration) -> Self {
        Self::within(ranks, timeout, None)
    }

    /// Like [`InMemoryLinks::new`], for some ranks of a larger world: if its alarm `outer` is raised, the links fail
    /// too.
    pub(crate) fn within(ranks: usize, timeout: Duration, outer: Option<Arc<dyn Alarm>>) -> Self {
        let channels = (0..ranks).map(|_| AtomicU64::default()).collect();
        let mailboxes = Mailboxes { state: Monitor::default(), timeout, channels, outer };
        Self { mailboxes: Arc::new(mailboxes), members: (0..ranks).map(Rank).collect() }
    }

    /// Creates the link of `rank` on `channel`. Different channels are independent.
    pub fn link(&self, channel: u64, rank: Rank) -> Box<dyn Link> {
        Box::new(InMemoryLink::new(self.mailboxes.clone(), channel, rank, self.members.clone()))
    }

    /// The alarm of all these links.
    pub fn alarm(&self) -> Arc<dyn Alarm> {
        self.mailboxes.clone()
    }

    /// Bytes that `rank` has sent so far, without headers.
    pub fn sent_bytes(&self, rank: Rank) -> u64 {
        self.mailboxes.state.lock().sent_bytes.get(&rank).copied().unwrap_or(0)
    }
}

struct InMemoryLink {
    mailboxes: Arc<Mailboxes>,
    channel: u64,
    rank: usize,
    members: Arc<[Rank]>,
}

impl InMemoryLink {
    fn new(mailboxes: Arc<Mailboxes>, channel: u64, rank: Rank, members: Arc<[Rank]>) -> Self {
        mailboxes.channels[rank.0].fetch_max(channel + 1, Ordering::Relaxed);
        Self { mailboxes, channel, rank: place(rank, &members), members }
    }

    fn world_rank(&self) -> Rank {
        self.members[self.rank]
    }

    fn send(&self, outgoing: Outgoing<'_>) -> Result<(), CommError> {
        let (from, to) = (self.world_rank(), self.members[outgoing.to]);
        let mut state = self.mailboxes.state.lock();
        if let Some(error) = &state.alarm {
            return Err(error.clone());
        }
        *state.sent_bytes.entry(from).or_default() += outgoing.len_bytes();
        let message = Message { header: *outgoing.header, bytes: outgoing.parts.concat() };
        state.boxes.entry((self.channel, from, to)).or_default().push_back(message);
        self.mailboxes.state.notify();
        Ok(())
    }

    /// Waits for the next message of a member; returns `None` after the time limit.
    fn next(&self, from: usize) -> Result<Option<Message>, CommError> {
        let (rank, to) = (self.members[from], self.world_rank());
        let begin = Instant::now();
        let mut state = self.mailboxes.state.lock();
        loop {
            let outer = self.mailboxes.outer.as_ref().and_then(|outer| outer.raised());
            if let Some(error) = outer.as_ref().or(state.alarm.as_ref()) {
                return Err(error.clone());
            }
            let message = state.boxes.get_mut(&(self.channel, rank, to)).and_then(VecDeque::pop_front);
            if let Some(message) = message {
                return Ok(Some(message));
            }
            if state.closed.contains(&(self.channel, rank)) {
                return Err(CommError::PeerFailed { rank, reason: "it has closed its links".to_owned() });
            }
            let left = self.mailboxes.timeout.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            let wait = if self.mailboxes.outer.is_some() { left.min(POLL_INTERVAL) } else { left };
            state = self.mailboxes.state.wait(state, wait);
        }
    }

    fn receive(&self, incoming: Incoming<'_, '_>) -> Result<Exchanged, CommError> {
        let Some(Message { header, bytes }) = self.next(incoming.from)? else {
            return Ok(Exchanged::Late { peer: incoming.from });
        };
        if header != *incoming.header || bytes.len() as u64 != incoming.len_bytes() {
            return Ok(Exchanged::Differs { header, len_bytes: bytes.len() as u64 });
        }
        scatter(&bytes, incoming.parts);
        Ok(Exchanged::Done)
    }
}

impl Link for InMemoryLink {
    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self) -> &[Rank] {
        &self.members
    }

    fn exchange(
        &mut self,
        outgoing: Option<Outgoing<'_>>,
        incoming: Option<Incoming<'_, '_>>,
    ) -> Result<Exchanged, CommError> {
        outgoing.map_or(Ok(()), |outgoing| self.send(outgoing))?;
        incoming.map_or(Ok(Exchanged::Done), |incoming| self.receive(incoming))
    }

    fn unused_channel(&self) -> u64 {
        self.mailboxes.channels[self.world_rank().0].load(Ordering::Relaxed)
    }

    fn subgroup(&self, members: Arc<[Rank]>, channel: u64) -> Box<dyn Link> {
        Box::new(InMemoryLink::new(self.mailboxes.clone(), channel, self.world_rank(), members))
    }

    fn alarm(&self) -> Arc<dyn Alarm> {
        self.mailboxes.clone()
    }
}

impl Drop for InMemoryLink {
    fn drop(&mut self) {
        self.mailboxes.state.lock().closed.insert((self.channel, self.world_rank()));
        self.mailboxes.state.notify();
    }
}
