//! Reads the memory of another process.

use std::io::{self, IoSliceMut};

/// The location of bytes in the memory of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemoryRange {
    pub(super) address: u64,
    pub(super) len: u64,
}

impl MemoryRange {
    /// The location of `bytes` in this process. They must stay in place while others may read them.
    pub(super) fn of(bytes: &[u8]) -> Self {
        Self { address: bytes.as_ptr().expose_provenance() as u64, len: bytes.len() as u64 }
    }
}

#[cfg(target_os = "linux")]
pub(super) use linux::{Memory, allow_reads};

#[cfg(not(target_os = "linux"))]
pub(super) use other::{Memory, allow_reads};

#[cfg(target_os = "linux")]
mod linux {
    use nix::sys::uio::{RemoteIoVec, process_vm_readv};
    use nix::unistd::Pid;

    use super::*;

    /// Maximum number of slices that the operating system accepts in one call.
    const SLICES_MAX: usize = 1024;

    /// The memory of a process on this machine.
    #[derive(Debug)]
    pub(in crate::tcp) struct Memory(Pid);

    impl Memory {
        /// The memory of a process, by process id as seen from this process; `None` if it is not a valid id.
        pub(in crate::tcp) fn of(process: u64) -> Option<Self> {
            i32::try_from(process).ok().filter(|&number| number > 0).map(|number| Self(Pid::from_raw(number)))
        }

        /// Reads the bytes at `places` into the slices, one after the other; the slices must have the same total
        /// length.
        ///
        /// # Errors
        /// The error of the operating system: no such process, no such memory, or no permission.
        pub(in crate::tcp) fn read(
            &self,
            places: &[MemoryRange],
            mut into: &mut [IoSliceMut<'_>],
        ) -> io::Result<()> {
            let remote =
                |place: &MemoryRange| RemoteIoVec { base: place.address as usize, len: place.len as usize };
            let mut places: Vec<RemoteIoVec> = places.iter().map(remote).collect();
            let mut places = &mut places[..];
            while let Some(first) = places.first_mut() {
                if first.len == 0 {
                    places = &mut places[1..];
                    continue;
                }
                let (from, to) = (places.len().min(SLICES_MAX), into.len().min(SLICES_MAX));
                let mut read = process_vm_readv(self.0, &mut into[..to], &places[..from])?;
                if read == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                IoSliceMut::advance_slices(&mut into, read);
                for place in places.iter_mut() {
                    let taken = place.len.min(read);
                    (place.base, place.len, read) = (place.base + taken, place.len - taken, read - taken);
                    if read == 0 {
                        break;
                    }
                }
            }
            Ok(())
        }
    }

    /// Lets processes of the same user read this process's memory where a security module (Yama) restricts that to its
    /// ancestors.
    pub(in crate::tcp) fn allow_reads() {
        // Without that module the call fails, and is not needed.
        let _ = rustix::process::set_ptracer(rustix::process::PTracer::Any);
    }
}

#[cfg(not(target_os = "linux"))]
mod other {
    use super::*;

    /// Not supported on this system.
    #[derive(Debug)]
    pub(in crate::tcp) enum Memory {}

    impl Memory {
        pub(in crate::tcp) fn of(_process: u64) -> Option<Self> {
            None
        }

        pub(in crate::tcp) fn read(
            &self,
            _places: &[MemoryRange],
            _into: &mut [IoSliceMut<'_>],
        ) -> io::Result<()> {
            match *self {}
        }
    }

    pub(in crate::tcp) fn allow_reads() {}
}
