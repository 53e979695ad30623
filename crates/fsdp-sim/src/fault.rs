//! Fault rules: a rank that fails on purpose, at a chosen collective.
//!
//! Rules are plain data in [`WorldOptions`](crate::WorldOptions); the first one that matches decides. They
//! act where a rank enters a collective, so that a test exercises the same code as the real failure.

use fsdp_core::Rank;
use fsdp_core::comm::{CollectiveKind, CommError, Fingerprint, ReduceOp};

use crate::board::Board;

/// What a faulty rank does instead of its collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Its collective returns a transport error.
    Error,
    /// It panics.
    Panic,
    /// It calls another kind of collective.
    WrongCollective,
    /// It calls with another number of elements.
    WrongLength,
    /// It never arrives: it blocks until the world has failed.
    Never,
}

/// One rule: `rank` takes `action` instead of its collective number `nth`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fault {
    /// The rank that is to fail.
    pub rank: Rank,
    /// Which of its collectives, counted from 0 over all its communicators, splits included.
    pub nth: u64,
    /// What it does.
    pub action: Action,
}

/// Applies the rules to collective `nth` of `rank`: the call that it makes instead.
pub(crate) fn intercept(
    faults: &[Fault],
    board: &Board,
    rank: Rank,
    nth: u64,
    call: Fingerprint,
) -> Result<Fingerprint, CommError> {
    let Some(fault) = faults.iter().find(|fault| fault.rank == rank && fault.nth == nth) else {
        return Ok(call);
    };
    match fault.action {
        Action::Error => Err(CommError::Transport { rank, reason: format!("injected fault in {call}") }),
        Action::Panic => panic!("injected fault in {call}"),
        Action::WrongCollective => Ok(Fingerprint { kind: other_kind(call.kind), ..call }),
        Action::WrongLength => Ok(Fingerprint { elements: call.elements + 1, ..call }),
        Action::Never => Err(board.never(rank, call)),
    }
}

fn other_kind(kind: CollectiveKind) -> CollectiveKind {
    match kind {
        CollectiveKind::AllGather => CollectiveKind::ReduceScatter(ReduceOp::Sum),
        CollectiveKind::ReduceScatter(op) => CollectiveKind::AllReduce(op),
        CollectiveKind::AllReduce(_)
        | CollectiveKind::Broadcast { .. }
        | CollectiveKind::Split
        | CollectiveKind::Connect => CollectiveKind::AllGather,
    }
}
