//! The control plane as state machines, without sockets, clocks or threads. The rules are in the documentation of
//! [`process`](super).

mod leader;
mod machine;
mod member;
mod pulse;

pub(super) use leader::Leader;
pub(super) use machine::{ConnectionId, Event, GRACE, LEAVE_MAX, Machine, Output, Request};
pub(super) use member::Member;
pub(super) use pulse::Pulse;

#[cfg(test)]
mod tests;
