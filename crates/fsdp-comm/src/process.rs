//! Worlds of several processes: how they come together, tell each other values, and learn that one of them has failed.
//!
//! Every process holds some ranks, at least one; ranks follow each other in the order of processes. Process 0, which
//! holds rank 0, is the *leader*. Every other process has one TCP connection to it, the *control plane*, beside whatever
//! carries its data. Processes other than the leader know nothing of each other but what the leader says.
//!
//! # The protocol
//!
//! A connection begins with a [proof](auth), both ways, that its ends know the token of the run. Then:
//!
//! | who | says | when | what follows |
//! |---|---|---|---|
//! | member | join | first | *joined*, with the generation of the world, or *refused*, with the reason |
//! | leader | prepare | all processes are connected at once | every member has the same roster |
//! | member | ready | it has the roster of this round | |
//! | leader | go | all are ready for this round, and no connection was lost since | the world begins |
//! | both | heartbeat | each `heartbeat` (1 s) | |
//! | both | calling | with a heartbeat, when another collective was begun last | a verdict on it can say so |
//! | member | give | a rank of it gives a value to a topic | the leader's process can collect it |
//! | both | announce | a rank announces a value | every process hears it: the leader passes on what a member announces |
//! | member | failed | something failed in it, or it has found that another process failed | a verdict |
//! | leader | verdict | once, with the first failure | every process fails |
//! | both | goodbye | it has ended well, or its failure is known | its connection may close |
//!
//! Joining: a connection that is lost before *go* takes its process out again, whoever was ready has to say so again, and
//! the process may come back. An index can be held once: a second process that comes with it is refused, but the same
//! one, known by a random number of its own, takes its own place. Whoever contradicts the leader (another number of processes, an index
//! that is too high, another version of the program) is refused at once. Who comes when the world has begun is
//! refused, and tries again until its time is over: it may belong to the next start, and the leader to the last one.
//!
//! The *generation* is a random number of the leader. Every message behind a join carries it, and one that carries
//! another is not heard: its sender belongs to an earlier world.
//!
//! # What is a failure
//!
//! - A process says that it has failed. What a process says of *another* one is held for two heartbeats: that one may know
//!   better why, and says so itself, or its connection closes.
//! - A connection closes without goodbye. The verdict is there as soon as the system says so.
//! - A process is silent for `dead_after` (15 s). A process that was stopped itself does not blame others: a gap of more
//!   than two heartbeats between two looks at the clock counts as two.
//! - A process says what it must not say: a broken message, a rank that is not its own, another generation.
//!
//! The first one is the [`Verdict`]; there is one per world, and later failures do not change it. When the leader is
//! lost, every other process says so itself, with the collective that the leader has told them of last. Connections
//! stay open after a verdict, so that what all ranks have begun may be ended: who waits for a rank that is dead is told
//! at once, for others within 3 s. What a process gave before its end counts.
//!
//! # The end
//!
//! A process that has ended says goodbye; nothing more is expected of it. The leader leaves last: when all others have
//! left or are dead, or when they have had a minute, or 3 s behind a verdict.

pub mod ancestor;
pub mod auth;
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
