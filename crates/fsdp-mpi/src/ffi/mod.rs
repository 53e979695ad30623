//! All unsafe code of this crate, behind safe functions: MPI calls, and the memory that MPI reads and writes.
//!
//! | module | contents |
//! |---|---|
//! | [`library`] | finds, opens and identifies a library |
//! | [`functions`] | the functions and constants of each family |
//! | [`message`] | messages of several blocks of memory |
//! | [`mpi`] | initialized MPI on the thread that owns it; operations in flight |
//! | [`loan`] | slices of a caller, lent to another thread until all pieces have been returned |
//!
//! Every unsafe block states the facts that it relies on, and where they are checked.

mod functions;
mod library;
mod loan;
mod message;
mod mpi;

pub use library::{Family, MpiLibrary};
pub(crate) use loan::{Piece, lend};
pub(crate) use mpi::{Memory, Mpi, Request};
