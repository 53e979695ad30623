//! Worlds of several processes: how they rendezvous, exchange values, and learn that one of them has failed.
//!
//! Every process holds at least one rank; ranks are numbered in the order of processes. Process 0, which holds rank 0,
//! is the *leader*. Every other process (a *member*) has one TCP connection to it, the *control plane*, besides the
//! connections that carry its data. Members know of each other only through the leader.
//!
//! # The protocol
//!
//! A connection begins with a mutual [proof](crate::auth) that both ends know the token of the run. Then:
//!
//! | sender | message | when | effect |
//! |---|---|---|---|
//! | member | join | first | *joined*, with the generation of the world, or *refused*, with the reason |
//! | leader | prepare | all processes are connected at once | every member has the same roster |
//! | member | ready | it has the roster of this round | |
//! | leader | go | all are ready for this round, and no connection was lost since | the world begins |
//! | both | heartbeat | every `heartbeat` (1 s) | |
//! | both | calling | with a heartbeat, if another collective has begun since | a verdict on the sender can name it |
//! | member | give | one of its ranks gives a value to a topic | the leader's process can collect it |
//! | both | announce | a rank announces a value | every process receives it: the leader forwards it to the others |
//! | member | failed | something failed in it, or it has found that another process failed | a verdict |
//! | leader | verdict | once, with the first failure | every process fails |
//! | both | goodbye | it has ended well, or its failure is known | its connection may close |
//!
//! Joining: if a connection is lost before *go*, its process is removed, the processes that were ready must report
//! ready again, and the lost process may come back. An index can be held once: a second process with the same index is
//! refused, but the same process, identified by a random number of its own, replaces its earlier connection. A process
//! that contradicts the leader (another number of processes, an index that is too high, another version of the program)
//! is refused, and gives up at once. A process that comes after the world has begun is refused, and retries until its
//! time is up: it may belong to the next start, and the leader to the last one.
//!
//! The *generation* is a random number chosen by the leader. Every message after the join carries it. A message with
//! another generation is not acted on: its sender belongs to an earlier world.
//!
//! # Failures
//!
//! - A process reports its own failure. A report about *another* process is held for two heartbeats: that process may
//!   know the reason better and report it itself, or its connection may close.
//! - A connection closes without goodbye. The verdict follows as soon as the operating system reports it.
//! - A process is silent for `dead_after` (15 s). A process that was itself stopped does not blame others: a gap of
//!   more than two heartbeats between two clock readings counts as two.
//! - A process violates the protocol: a broken message, a rank that is not its own, another generation.
//!
//! The first failure becomes the [`Verdict`]; there is one per world, and later failures do not change it. When the
//! leader is lost, every member reaches that verdict by itself, and names the last collective that the leader has
//! reported. Connections stay open after a verdict, so that work begun on all ranks can be finished: waiting for a dead
//! rank fails at once, for other ranks within 3 s. Values that a process gave before its end count.
//!
//! # The end
//!
//! A process that has ended says goodbye; nothing more is expected of it. The leader leaves last: when all others have
//! left or are dead, or after waiting one minute for them, or 3 s after a verdict.

pub mod ancestor;
pub mod cluster;
pub mod interface;
pub mod launch;
pub mod place;
pub mod rendezvous;

mod control;
mod frame;
mod message;
mod protocol;
mod world;

pub use control::{Control, ControlOptions, JoinError, Obstacle};
pub use frame::VALUE_MAX;
pub use message::Refusal;
pub use world::{Facts, Failure, ProcessEntry, Roster, SerdeKind, Verdict};
