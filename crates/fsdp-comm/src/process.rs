//! Worlds of several processes.

pub mod auth;
mod control;
mod frame;
mod message;
mod protocol;
mod world;

pub use control::{Control, ControlOptions, JoinError, Obstacle};
pub use message::Refusal;
pub use world::{Facts, Failure, ProcessEntry, Roster, Verdict};
