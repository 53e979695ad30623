//! All unsafe code of this crate: calls of MPI, and memory that it reads and writes, behind safe functions.
//!
//! | module | what |
//! |---|---|
//! | [`library`] | finding and opening a library, telling whose it is |
//! | [`functions`] | the functions and constants of each family |
//! | [`message`] | messages of several blocks of memory |
//! | [`mpi`] | MPI, initialised, on the thread that owns it; operations that are under way |
//! | [`loan`] | slices of a caller, lent to another thread until all of it has come back |
//!
//! Every unsafe block says which facts it relies on, and who checked them.

mod functions;
mod library;
mod loan;
mod message;
mod mpi;

pub use library::{Family, MpiLibrary};
pub(crate) use loan::{Piece, lend};
pub(crate) use mpi::{Memory, Mpi, Request};
