//! Worlds of several processes.

pub mod auth;
pub mod interface;
pub mod launch;
pub mod place;
pub mod rendezvous;
