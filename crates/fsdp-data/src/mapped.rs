//! Memory-mapped files: the only unsafe code of this crate.
//!
//! The pages of a mapping belong to the kernel's page cache. All processes of a node share them, the kernel can evict
//! them when memory is short, and opening a file takes constant time, whatever its length.
//!
//! In exchange, a file must not change while it is mapped. Its length is taken when it is opened, and nothing is read
//! beyond it. If the file is truncated afterwards, reading the missing part ends the process with SIGBUS, which its
//! parent sees as death by that signal; on NFS, this also happens if another machine removes or replaces the file. If
//! the file is written to, later reads may return other bytes; they are only ever interpreted as numbers, for which
//! every bit pattern is valid.

use std::fs::File;
use std::io;
use std::ops::Deref;

use memmap2::{Advice, Mmap, MmapOptions};

/// The bytes of a file, with the length it had when it was opened.
#[derive(Debug)]
pub(super) struct Mapped(Mmap);

impl Mapped {
    /// Maps a regular file. The mapping stays valid when the file is closed, renamed or removed.
    ///
    /// # Errors
    /// Errors of the system: the file system does not support mappings, no address space, too many mappings.
    pub(super) fn of(file: &File) -> io::Result<Mapped> {
        // A private mapping shares its pages too, and is supported by more file systems (FUSE) than a shared one.
        //
        // SAFETY: the mapping is read-only, and `Mmap` keeps its address and length until it unmaps it. Users must not
        // change the file, and the token cache never writes to its files; the module documentation says what happens
        // otherwise.
        let mapped = unsafe { MmapOptions::new().map_copy_read_only(file) };
        mapped.map(Mapped)
    }

    /// Disables read-ahead: from now on, a read loads only the pages it touches and not those around them, which may be
    /// megabytes each time.
    pub(super) fn disable_read_ahead(&self) {
        // An error is ignored, because the advice only affects speed.
        let _ = self.0.advise(Advice::Random);
    }
}

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn mapping_matches_file_and_survives_unlink() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        for len in [0, 1, 4095, 4096, 4097, 100_000] {
            let bytes: Vec<u8> = (0..len).map(|index: u32| (index % 251) as u8).collect();
            fs::write(&path, &bytes).unwrap();
            let mapped = Mapped::of(&File::open(&path).unwrap()).unwrap();
            fs::remove_file(&path).unwrap();
            assert_eq!(*mapped, *bytes, "{len}");
        }
    }
}
