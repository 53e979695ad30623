//! Fault rules: a rank that fails on purpose, at a chosen collective.
//!
//! Rules are plain data; the first matching rule applies. They act where a rank enters a collective, so that a test
//! runs the same code as a real failure.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;

use fsdp_core::Rank;
use fsdp_core::comm::{CollectiveKind, CommError, Fingerprint, ReduceOp};

use crate::lock::lock;

/// How a rank enters a collective.
#[derive(Debug)]
pub enum Entry {
    /// It makes this call instead.
    Call(Fingerprint),
    /// Its call fails.
    Fail(CommError),
    /// It never enters: it blocks until the world has failed.
    Stall,
}

/// Sees every call of every rank before it is made.
pub trait Intercept: fmt::Debug + Send + Sync {
    /// Decides what `rank` does instead of `call`.
    fn entry(&self, rank: Rank, call: Fingerprint) -> Entry;
}

/// The action of a faulty rank instead of its collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// The collective returns a transport error.
    Error,
    /// The rank panics.
    Panic,
    /// The rank calls another kind of collective.
    WrongCollective,
    /// The rank calls with another number of elements.
    WrongLength,
    /// The rank never arrives: it blocks until the world has failed.
    Never,
}

/// One rule: `rank` takes `action` instead of its collective number `nth`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fault {
    /// The rank that fails.
    pub rank: Rank,
    /// Number of the collective, counted from 0 over all of the rank's communicators, including splits.
    pub nth: u64,
    /// The rank's action.
    pub action: Action,
}

/// The faults of one world, for [`ThreadOptions::intercept`](crate::ThreadOptions::intercept).
#[derive(Debug, Default)]
pub struct Faults {
    rules: Vec<Fault>,
    /// Number of collectives that each rank has entered.
    counts: Mutex<BTreeMap<Rank, u64>>,
}

impl Faults {
    /// Creates these faults for a new world.
    pub fn new(rules: Vec<Fault>) -> Self {
        Self { rules, counts: Mutex::default() }
    }
}

impl Intercept for Faults {
    fn entry(&self, rank: Rank, call: Fingerprint) -> Entry {
        let nth = {
            let mut counts = lock(&self.counts);
            let count = counts.entry(rank).or_default();
            *count += 1;
            *count - 1
        };
        let fault = self.rules.iter().find(|fault| fault.rank == rank && fault.nth == nth);
        match fault.map(|fault| fault.action) {
            None => Entry::Call(call),
            Some(Action::Error) => {
                Entry::Fail(CommError::Transport { rank, reason: format!("injected fault in {call}") })
            }
            Some(Action::Panic) => panic!("injected fault in {call}"),
            Some(Action::WrongCollective) => Entry::Call(Fingerprint { kind: other_kind(call.kind), ..call }),
            Some(Action::WrongLength) => Entry::Call(Fingerprint { elements: call.elements + 1, ..call }),
            Some(Action::Never) => Entry::Stall,
        }
    }
}

fn other_kind(kind: CollectiveKind) -> CollectiveKind {
    match kind {
        CollectiveKind::AllGather => CollectiveKind::ReduceScatter(ReduceOp::Sum),
        CollectiveKind::ReduceScatter(op) => CollectiveKind::AllReduce(op),
        CollectiveKind::AllReduce(_)
        | CollectiveKind::AllToAll
        | CollectiveKind::Broadcast { .. }
        | CollectiveKind::Split
        | CollectiveKind::Connect => CollectiveKind::AllGather,
    }
}
