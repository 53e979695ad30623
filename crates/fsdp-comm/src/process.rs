//! Worlds of several processes.

pub mod auth;
