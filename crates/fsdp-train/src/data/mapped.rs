//! Files mapped into memory: the only unsafe code of this crate.
//!
//! The pages of a mapping are those of the kernel's cache of files. So all processes of a node share them, they are given
//! up when memory is short, and opening a file takes no time, however long it is.
//!
//! The price: a file must not change while it is mapped. Its length is taken when it is opened, so nothing is read behind
//! that. If the file is cut afterwards, reading what is gone ends the process with SIGBUS, which whoever started it sees as
//! a death by that signal; on NFS, also if another machine removes or replaces it. If it is written to, other bytes may be
//! read from then on; they are only ever taken as numbers, and every byte is one.

use std::fs::File;
use std::io;
use std::ops::Deref;

use memmap2::{Advice, Mmap, MmapOptions};

/// The bytes of a file, as long as it was when it was opened.
#[derive(Debug)]
pub(super) struct Mapped(Mmap);

impl Mapped {
    /// Maps a regular file. The mapping stays when the file is closed, renamed or removed.
    ///
    /// # Errors
    /// Those of the system: a file system that can not map, no address space, too many mappings.
    pub(super) fn of(file: &File) -> io::Result<Mapped> {
        // A private mapping shares its pages too, and exists on more file systems (FUSE) than a shared one.
        //
        // SAFETY: the mapping is read-only, and `Mmap` holds its address and length until it unmaps it. That nobody
        // changes the file is asked of users, and of the cache of tokens, whose files are never written to; what
        // happens otherwise stands at the head of this file.
        let mapped = unsafe { MmapOptions::new().map_copy_read_only(file) };
        mapped.map(Mapped)
    }

    /// From now on reads of a part bring in that part and not what is around it, which may be megabytes each time.
    pub(super) fn is_read_here_and_there(&self) {
        // What the kernel does not take changes speed alone.
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
    fn a_mapping_has_the_bytes_of_the_file_and_outlives_its_name() {
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
