//! Moving tensor bytes from a checkpoint of any format into planned files, with bounded memory.
//!
//! A writer of a format plans its output from names, types and shapes alone ([`OutputPlan`]): the length of
//! every file, the bytes that are known beforehand, and where the elements of each tensor go. The transfer
//! then fills the data in, in any order and by several threads, and hands the writer the digests that it asked
//! for, of which some formats make their last bytes (a zip directory, a manifest).
//!
//! Data moves in pieces of about a megabyte, which stay in the cache between reading, converting, the
//! checksums and writing: so neither the size of a tensor nor that of the checkpoint matters. Larger buffers,
//! up to the window of [`Options`], serve transposed tensors only.
//!
//! The modules form a line: each uses only those above it here, and nothing further down.

// What is asked for, and how it may be done.
mod options;
mod plan;

mod threads;

// Where bytes lie.
mod gather;
mod open_files;
mod parts;
mod runs;

// Reading them, and holding them against checksums.
mod checks;
mod spool;
mod zstd_stream;

mod sources;

mod elements;

// Writing them.
mod staged;

mod output;

// Both, for a whole plan.
mod work;

mod run;

pub use options::{NoProgress, Options, Progress, WINDOW_BYTES};
pub use plan::{Finish, FinishFn, OutputPlan, Place, PlannedFile};
pub use run::{Moved, run};
pub use staged::{OutputKind, Staged};

pub(crate) use elements::Reading;
pub(crate) use parts::TensorReader;
pub(crate) use sources::SourceFiles;
pub(crate) use threads::{PieceSizes, Pieces, in_threads};
pub(crate) use work::scratch_bytes;
