//! What communicators share: collective algorithms over links, counters, the conformance suite.
#![forbid(unsafe_code)]

pub mod launch;
