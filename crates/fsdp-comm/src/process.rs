//! Worlds of several processes.

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
pub use message::Refusal;
pub use world::{Facts, Failure, ProcessEntry, Roster, Verdict};
