//! Links over MPI: over a stand-in whose processes are threads, and over whatever MPI this machine has.
#![expect(clippy::unwrap_used, reason = "a test that can not go on fails")]

mod conformance;
mod exchanges;
mod failures;
mod fake;
mod opening;
mod real;
