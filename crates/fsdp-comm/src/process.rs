//! Worlds of several processes.

pub mod auth;
mod frame;
mod message;
mod protocol;
mod world;

pub use message::Refusal;
pub use world::{Facts, Failure, ProcessEntry, Roster, Verdict};
