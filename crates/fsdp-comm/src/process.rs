//! Worlds of several processes.

pub mod auth;
pub mod interface;
pub mod place;
pub mod rendezvous;
