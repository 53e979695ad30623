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

mod checks;
mod elements;
mod gather;
mod open_files;
mod output;
mod run;
mod runs;
mod sources;
mod spool;
mod staged;
mod work;
mod zstd_stream;

use std::{num::NonZero, ops::Range, sync::atomic::AtomicBool};

pub use run::{Moved, run};
pub use staged::{OutputKind, Staged};

pub(crate) use elements::TensorReader;
pub(crate) use run::{in_threads, piece_bytes, piece_sizes};
pub(crate) use sources::SourceFiles;
pub(crate) use work::PieceSizes;
pub(crate) use zstd_stream::decode;

use crate::{
    digest::{Digest, DigestKind},
    error::Error,
    safetensors::TensorType,
};

/// Makes the last bytes out of the digests of all places, in the order of the files and of their places.
pub type FinishFn = Box<dyn FnOnce(&[Vec<Option<Digest>>]) -> Result<Finish, Error> + Send>;

/// The files of a new checkpoint.
pub struct OutputPlan {
    /// The files, with names relative to the output directory.
    pub files: Vec<PlannedFile>,
    /// Makes the last bytes.
    pub finish: FinishFn,
}

/// A file of known length.
#[derive(Clone, Debug, Default)]
pub struct PlannedFile {
    /// Name relative to the output directory, or of the output itself where that is one file.
    pub name: String,
    /// Length in bytes. Bytes that nothing writes are zero.
    pub len: u64,
    /// Bytes that are known beforehand, with their offsets.
    pub literals: Vec<(u64, Vec<u8>)>,
    /// Where tensor elements go.
    pub places: Vec<Place>,
}

/// A run of elements of a tensor in a planned file.
#[derive(Clone, Debug)]
pub struct Place {
    /// First byte in the file.
    pub offset: u64,
    /// Name of the tensor in the source checkpoint.
    pub tensor: String,
    /// Which elements of the tensor, flattened in C order.
    pub elements: Range<u64>,
    /// Element type in the file; another one than the tensor's converts.
    pub dtype: TensorType,
    /// The digest to compute of the bytes written here.
    pub digest: Option<DigestKind>,
}

/// What is written last.
#[derive(Clone, Debug, Default)]
pub struct Finish {
    /// Bytes at offsets of planned files: (index of the file, offset, bytes).
    pub patches: Vec<(usize, u64, Vec<u8>)>,
    /// Whole small files, by name.
    pub files: Vec<(String, Vec<u8>)>,
}

/// Who is told how far long work has come. Called from several threads.
pub trait Progress: Sync {
    /// Work of this many bytes begins.
    fn begin(&self, total_bytes: u64);

    /// This many more bytes are done.
    fn advance(&self, bytes: u64);
}

/// Nobody.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn begin(&self, _: u64) {}

    fn advance(&self, _: u64) {}
}

/// The window of [`Options::new`].
pub const WINDOW_BYTES: usize = 256 << 20;

/// How bytes are moved.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    /// Bytes that all buffers together may take.
    pub window_bytes: usize,
    /// Threads that read, convert and write.
    pub threads: NonZero<usize>,
    /// Whether the output is durable before it gets its name.
    pub sync: bool,
    /// Who is told how far the work has come.
    pub progress: &'a dyn Progress,
    /// Set from outside to stop the work, which then fails and leaves nothing behind.
    pub cancel: &'a AtomicBool,
}

impl<'a> Options<'a> {
    /// The usual window, a thread per core, durable outputs.
    pub fn new(progress: &'a dyn Progress, cancel: &'a AtomicBool) -> Options<'a> {
        let threads = std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
        Options { window_bytes: WINDOW_BYTES, threads, sync: true, progress, cancel }
    }
}
