//! Links over MPI: messages between processes that `mpirun` or `srun` has started.
//!
//! This crate is a part of [`fsdp`](https://docs.rs/fsdp), without a promise of stability: any version may change it.
//!
//! The MPI library is opened at run time, so one program supports Open MPI, MPICH (and libraries that are binary
//! compatible with it) and the standard ABI of MPI 5, and also runs where none is installed. Only messages between two
//! ranks are used; the collectives are the algorithms of `fsdp-comm`. MPI's own reductions add in an unspecified order,
//! which would make the bits of a run depend on the library.
//!
//! - [`MpiLibrary`]: a library that is open and identified, but not initialized.
//! - [`MpiWorld`]: this process as one rank of `MPI_COMM_WORLD`; it makes links.
//!
//! [`MpiWorld`] describes how a message travels. All unsafe code is in `ffi`.

mod error;
#[expect(unsafe_code, reason = "the one module of this crate that may")]
mod ffi;

mod engine;
mod exchange;
mod link;
mod preamble;
mod world;

pub use error::{Attempt, MpiError};
pub use ffi::{Family, MpiLibrary};
pub use world::MpiWorld;
