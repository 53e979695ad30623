//! The communication contract.
//!
//! Backends implement [`Communicator`]; everything else calls [`Comm`]. [`Comm`] checks lengths, dtypes and exclusive
//! access, and assigns sequence numbers and fingerprints, before it calls the backend, so no backend can forget to.
//!
//! Collectives are asynchronous: buffers move into a [`Pending`], and [`Pending::wait_on`] returns them. Dropping a
//! `Pending` without waiting aborts the communicator, because its buffers may still be in flight.

mod comms;
mod communicator;
mod front;
mod pending;

mod agree;
mod traffic;

pub use crate::collective::{CollectiveKind, Fingerprint, Purpose, ReduceOp};
pub use crate::error::{CommError, RankStatus};
pub use comms::Comms;
pub use communicator::{Communicator, Completed, InFlight};
pub use front::Comm;
pub use pending::Pending;
pub use traffic::Traffic;

#[cfg(test)]
pub(crate) mod tests;
