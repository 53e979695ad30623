//! Errors of the core and of the traits that backends implement.

mod collective;
mod violation;

pub use collective::{CommError, RankStatus};
pub use violation::Violation;

use crate::dtype::DType;
use crate::failure::FailureKind;
use crate::out_of_memory::{MemoryKind, OutOfMemory};

/// Errors that a correct caller can encounter. (A bug in this workspace panics instead, naming the broken invariant.)
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The mesh does not fit the world, or an axis the mesh.
    #[error("a mesh of {mesh} {why}")]
    Mesh {
        /// The requested mesh.
        mesh: String,
        /// What does not fit.
        why: String,
    },
    /// The placements of a tensor do not give every coordinate of its mesh one box.
    #[error("{what}")]
    Distribution {
        /// The problem, as a sentence about "it", the tensor.
        what: String,
    },
    /// The model description contradicts itself.
    #[error("invalid model: {what}")]
    Model {
        /// The problem, naming module, block or parameter.
        what: String,
    },
    /// A wrap policy names classes that the model does not have.
    #[error("no module of class `{class}` to wrap: there are {}", known.join(", "))]
    WrapClass {
        /// The unknown class.
        class: String,
        /// The classes that exist.
        known: Vec<String>,
    },
    /// A wrap policy would put the uses of a tied parameter into different units.
    #[error(
        "the tied parameter `{param}` (also `{alias}`) would be split over the units `{first}` and `{second}`; \
         leave both uses in one unit, usually the root"
    )]
    TiedAcrossUnits {
        /// First name of the parameter.
        param: String,
        /// Its other name.
        alias: String,
        /// The unit that owns the first name.
        first: String,
        /// The unit that owns the other name.
        second: String,
    },
    /// A policy value that does not fit the mesh or the other policies.
    #[error("{key} = {value}: {expected}")]
    Policy {
        /// The field of [`Policy`](crate::schedule::Policy).
        key: &'static str,
        /// The rejected value.
        value: String,
        /// The allowed values, and a way out.
        expected: String,
    },
    /// The checker rejected a schedule.
    #[error("the schedule is unsafe: {0}")]
    Schedule(#[from] Violation),
    /// A unit is to be resharded while the program still holds a view of its parameters.
    #[error("unit `{unit}` is resharded while the program still views its parameters")]
    Viewed {
        /// The unit.
        unit: String,
    },
    /// An operation needs a buffer that a collective in flight or an open gradient has taken. Schedules that pass the
    /// checker never do.
    #[error("buffer {buffer} ({name}) is in use by another operation")]
    BufferInUse {
        /// Number of the buffer in the schedule.
        buffer: usize,
        /// The buffer's purpose.
        name: String,
    },
    /// A buffer is to be written while other handles still read its storage.
    #[error("a buffer of {len} x {dtype} is written while {readers} other handle(s) read it")]
    Shared {
        /// Elements.
        len: usize,
        /// Their type.
        dtype: DType,
        /// Number of other handles.
        readers: usize,
    },
    /// A buffer was read after its contents were released.
    #[error("a buffer of {len} x {dtype} is read after it was released")]
    Released {
        /// Elements.
        len: usize,
        /// Their type.
        dtype: DType,
    },
    /// Out of memory for a buffer, for a kernel's scratch space or for a library's temporary.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// A device failed, or a library that uses it; the source names the call, the device and the remedy.
    #[error(transparent)]
    Device(Box<dyn std::error::Error + Send + Sync>),
    /// A device rejects what it was given to run, and would reject it again; the source says what to change.
    #[error(transparent)]
    Refused(Box<dyn std::error::Error + Send + Sync>),
    /// A block used a parameter that is not unsharded or not in the block's list.
    #[error("block `{block}` uses parameter `{param}`, which {why}")]
    Parameter {
        /// The block.
        block: String,
        /// The parameter.
        param: String,
        /// Why the parameter is not available.
        why: &'static str,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The model's code or the update rule failed.
    #[error("block `{block}`: {source}")]
    Program {
        /// The block that failed.
        block: String,
        /// The underlying error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl Error {
    /// Classifies this failure.
    pub fn kind(&self) -> FailureKind {
        match self {
            Error::Mesh { .. }
            | Error::Distribution { .. }
            | Error::Model { .. }
            | Error::WrapClass { .. }
            | Error::TiedAcrossUnits { .. }
            | Error::Policy { .. }
            | Error::Refused(_) => FailureKind::Input,
            Error::Schedule(_)
            | Error::Viewed { .. }
            | Error::BufferInUse { .. }
            | Error::Shared { .. }
            | Error::Released { .. }
            | Error::Parameter { .. }
            | Error::Program { .. } => FailureKind::Permanent,
            // A device belongs to the run alone. Other programs use the machine's memory too, and its limits can be raised.
            Error::OutOfMemory(error) if error.kind != MemoryKind::Host => FailureKind::Permanent,
            Error::Device(_) | Error::OutOfMemory(_) => FailureKind::Temporary,
            Error::Comm(error) => error.kind(),
        }
    }
}

impl From<OutOfMemory> for Error {
    fn from(error: OutOfMemory) -> Self {
        Error::OutOfMemory(Box::new(error))
    }
}
