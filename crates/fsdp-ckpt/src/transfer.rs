//! Moves tensor bytes from a checkpoint of any format into planned files, with bounded memory.
//!
//! A format's writer plans its output from names, dtypes and shapes alone ([`OutputPlan`]): the length of every file,
//! the bytes that are known beforehand, and the position of each tensor's elements. The transfer then fills in the
//! data, in any order and on several threads, and passes the requested digests to the writer, from which some formats
//! produce their last bytes (a zip directory, a manifest).
//!
//! Data moves in pieces of about a megabyte, which stay in the cache between reading, converting, checksumming and
//! writing, so memory use depends neither on the size of a tensor nor on that of the checkpoint. Larger buffers, up to
//! the window of [`Options`], are used for transposed tensors only.
//!
//! The modules are layered: each uses only those listed above it here.

// Requests and settings.
mod options;
mod plan;

mod threads;

// Locations of bytes.
mod gather;
mod open_files;
mod parts;
mod runs;

// Reading and checksum verification.
mod checks;
mod spool;
mod zstd_stream;

mod sources;

mod elements;

// Writing.
mod staged;

mod output;

// Running a whole plan.
mod work;

mod run;

pub use options::{NoProgress, Options, Progress, WINDOW_BYTES};
pub use plan::{OutputPlan, PlannedFile, PlannedRun, Tail, TailFn};
pub use run::{Moved, run};
pub use staged::{OutputKind, Staged};

pub(crate) use elements::Reading;
pub(crate) use parts::{TensorReader, needed};
pub(crate) use sources::{OpenSources, SourceFiles};
pub(crate) use threads::{PieceSizes, Pieces, in_threads};
pub(crate) use work::scratch_bytes;

#[cfg(test)]
mod tests {
    /// Names of the modules that follow `before` in this text.
    fn modules<'a>(text: &'a str, before: &'a str) -> impl Iterator<Item = &'a str> {
        let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
        text.split(before).skip(1).map(move |rest| rest.split(|c| !is_name(c)).next().unwrap_or(""))
    }

    #[test]
    fn modules_use_only_earlier_modules() {
        let order: Vec<&str> =
            modules(include_str!("transfer.rs"), "\nmod ").filter(|name| *name != "tests").collect();
        assert_eq!(order.len(), 16, "{order:?}");
        for (at, name) in order.iter().enumerate() {
            let path = format!("{}/src/transfer/{name}.rs", env!("CARGO_MANIFEST_DIR"));
            let text = std::fs::read_to_string(path).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap();
            let list = code.split("use super::").nth(1).and_then(|uses| uses.split(';').next()).unwrap_or("");
            let used = list.split(['{', '\n', ' ']).map(|word| word.split("::").next().unwrap_or(""));
            for used in used.filter(|used| order.contains(used)) {
                let place = order.iter().position(|other| *other == used).unwrap();
                assert!(place < at, "`{name}` uses `{used}`, which is not above it");
            }
        }
    }
}
