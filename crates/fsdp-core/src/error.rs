//! Errors of the core and of the contracts behind it.

use crate::comm::CommError;
use crate::dtype::DType;
use crate::out_of_memory::OutOfMemory;

/// What a correct caller can meet. (What only a bug in this workspace can cause is a panic that names the
/// broken invariant.)
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The mesh does not fit the world.
    #[error(
        "{replicas} replicas do not divide a world of {world} ranks: their number has to be one of its divisors"
    )]
    Mesh {
        /// Asked-for size of the replicate axis.
        replicas: usize,
        /// Number of ranks.
        world: usize,
    },
    /// The model description contradicts itself.
    #[error("invalid model: {what}")]
    Model {
        /// What is wrong, naming module, block or parameter.
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
    /// A wrap policy would split the uses of a tied parameter over units.
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
        /// What is allowed, and the way out.
        expected: String,
    },
    /// The checker rejected a schedule.
    #[error("the schedule is unsafe: {0}")]
    Schedule(#[from] crate::checker::Violation),
    /// A unit is to be given up, and the program still has a view of its parameters.
    #[error("unit `{unit}` is resharded while the program still views its parameters")]
    Viewed {
        /// The unit.
        unit: String,
    },
    /// An operation wants a buffer that is in a collective in flight, or an open gradient. No schedule that the checker
    /// accepts does so.
    #[error("buffer {buffer} ({name}) is used by another operation now")]
    Absent {
        /// Number of the buffer in the schedule.
        buffer: usize,
        /// What it is for.
        name: String,
    },
    /// Storage was to be written while something else still reads it.
    #[error("a buffer of {len} x {dtype} is written while {readers} other handle(s) read it")]
    Shared {
        /// Elements.
        len: usize,
        /// Their type.
        dtype: DType,
        /// How many other handles there are.
        readers: usize,
    },
    /// A buffer was read after its contents were given up.
    #[error("a buffer of {len} x {dtype} is read after it was released")]
    Released {
        /// Elements.
        len: usize,
        /// Their type.
        dtype: DType,
    },
    /// There is no room for a buffer, for scratch of a kernel or for a temporary of a library.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// A device failed, or a library that works on it did; the source names the call, the device and what to do.
    #[error(transparent)]
    Device(Box<dyn std::error::Error + Send + Sync>),
    /// A device does not take what it was to run, and would not take it another time; the source says what to change.
    #[error(transparent)]
    Refused(Box<dyn std::error::Error + Send + Sync>),
    /// A block used a parameter that is not unsharded, or not listed as one of its own.
    #[error("block `{block}` uses parameter `{param}`, which {why}")]
    Parameter {
        /// The block.
        block: String,
        /// The parameter.
        param: String,
        /// Why it can not be had.
        why: &'static str,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The model's code or the update rule failed.
    #[error("block `{block}`: {source}")]
    Program {
        /// Where.
        block: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl From<OutOfMemory> for Error {
    fn from(error: OutOfMemory) -> Self {
        Error::OutOfMemory(Box::new(error))
    }
}
