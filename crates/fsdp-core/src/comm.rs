//! The communication contract.
//!
//! [`Communicator`] is what a backend implements; [`Comm`] is what everybody calls. The checks of lengths,
//! dtypes and shares, the sequence numbers and the fingerprints are made in [`Comm`], once, in front of the
//! backend, so that no backend can forget them.
//!
//! Collectives are asynchronous: buffers move into a [`Pending`] and come back from [`Pending::wait_on`].
//! Dropping a `Pending` that was not waited for aborts the communicator: the buffers may still be in flight.

mod fingerprint;

mod communicator;
mod front;
mod pending;

mod agree;
mod error;
mod traffic;

pub use communicator::{Communicator, Completed, InFlight};
pub use error::{CommError, RankStatus};
pub use fingerprint::{CollectiveKind, Fingerprint, Purpose, ReduceOp};
pub use front::Comm;
pub use pending::Pending;
pub use traffic::Traffic;

#[cfg(test)]
pub(crate) mod tests;
