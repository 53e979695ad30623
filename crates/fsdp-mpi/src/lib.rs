//! Links over MPI: messages between processes that `mpirun` or `srun` has started.
//!
//! MPI is opened at run time, so one program serves Open MPI, MPICH (with what is binary compatible with it) and the
//! standard ABI of MPI 5, and runs where none is installed. Only messages between two ranks are used, under the
//! algorithms of `fsdp-comm`: reductions of MPI add in orders of their own, and the bits of a run would depend on them.
//!
//! - [`MpiLibrary`]: a library that is open and known, and not yet initialised.
//! - [`MpiWorld`]: this process as one rank of `MPI_COMM_WORLD`; it makes links.
//!
//! How a message travels is told in [`MpiWorld`]. All unsafe code is in `ffi`.

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
