//! Links within one process, for tests: a mailbox per pair of ranks, under one lock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fsdp_core::Rank;
use fsdp_core::comm::CommError;

use crate::link::{Alarm, Link};

/// Names a set of connections: which world, then the channels of subgroups on the way.
type Path = Vec<u64>;

#[derive(Default)]
struct State {
    boxes: BTreeMap<(Path, Rank, Rank), VecDeque<Vec<u8>>>,
    closed: BTreeSet<(Path, Rank)>,
    sent_bytes: BTreeMap<Rank, u64>,
    alarm: Option<CommError>,
}

struct Office {
    state: Mutex<State>,
    changed: Condvar,
    timeout: Duration,
}

impl Office {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Alarm for Office {
    fn raise(&self, error: CommError) {
        self.lock().alarm.get_or_insert(error);
        self.changed.notify_all();
    }

    fn raised(&self) -> Option<CommError> {
        self.lock().alarm.clone()
    }
}

/// The connections of a world whose ranks are threads.
#[derive(Clone)]
pub struct InMemoryLinks {
    office: Arc<Office>,
    members: Arc<[Rank]>,
}

impl InMemoryLinks {
    /// Connections among `ranks` ranks; nobody waits longer than `timeout` for a message.
    pub fn new(ranks: usize, timeout: Duration) -> Self {
        let office = Office { state: Mutex::default(), changed: Condvar::new(), timeout };
        Self { office: Arc::new(office), members: (0..ranks).map(Rank).collect() }
    }

    /// The ends of `rank`. Links of different `world`s are independent of each other.
    pub fn link(&self, world: u64, rank: Rank) -> Box<dyn Link> {
        Box::new(InMemoryLink {
            office: self.office.clone(),
            path: vec![world],
            rank: rank.0,
            members: self.members.clone(),
        })
    }

    /// The alarm of all these links.
    pub fn alarm(&self) -> Arc<dyn Alarm> {
        self.office.clone()
    }

    /// Bytes that `rank` has sent so far.
    pub fn sent_bytes(&self, rank: Rank) -> u64 {
        self.office.lock().sent_bytes.get(&rank).copied().unwrap_or(0)
    }
}

struct InMemoryLink {
    office: Arc<Office>,
    path: Path,
    rank: usize,
    members: Arc<[Rank]>,
}

impl InMemoryLink {
    fn world_rank(&self) -> Rank {
        self.members[self.rank]
    }
}

impl Link for InMemoryLink {
    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self) -> &[Rank] {
        &self.members
    }

    fn send(&mut self, to: usize, message: Vec<u8>) -> Result<(), CommError> {
        let (from, to) = (self.world_rank(), self.members[to]);
        let mut state = self.office.lock();
        if let Some(error) = &state.alarm {
            return Err(error.clone());
        }
        *state.sent_bytes.entry(from).or_default() += message.len() as u64;
        state.boxes.entry((self.path.clone(), from, to)).or_default().push_back(message);
        self.office.changed.notify_all();
        Ok(())
    }

    fn recv(&mut self, from: usize) -> Result<Option<Vec<u8>>, CommError> {
        let (rank, to) = (self.members[from], self.world_rank());
        let key = (self.path.clone(), rank, to);
        let sender = (self.path.clone(), rank);
        let mut state = self.office.lock();
        loop {
            if let Some(error) = &state.alarm {
                return Err(error.clone());
            }
            if let Some(message) = state.boxes.get_mut(&key).and_then(VecDeque::pop_front) {
                return Ok(Some(message));
            }
            if state.closed.contains(&sender) {
                return Err(CommError::PeerFailed { rank, reason: "it has closed its links".to_owned() });
            }
            let waited = self.office.changed.wait_timeout(state, self.office.timeout);
            let (woken, waited) = waited.unwrap_or_else(PoisonError::into_inner);
            if waited.timed_out() {
                return Ok(None);
            }
            state = woken;
        }
    }

    fn subgroup(&self, members: &[usize], channel: [u64; 2]) -> Box<dyn Link> {
        let rank = members.iter().position(|&member| member == self.rank);
        Box::new(InMemoryLink {
            office: self.office.clone(),
            path: self.path.iter().copied().chain(channel).collect(),
            rank: rank.expect("a rank is a member of its subgroups"),
            members: members.iter().map(|&member| self.members[member]).collect(),
        })
    }

    fn alarm(&self) -> Arc<dyn Alarm> {
        self.office.clone()
    }
}

impl Drop for InMemoryLink {
    fn drop(&mut self) {
        let closed = (std::mem::take(&mut self.path), self.members[self.rank]);
        self.office.lock().closed.insert(closed);
        self.office.changed.notify_all();
    }
}
