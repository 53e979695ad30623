//! Reading the memory of another process.

use std::io::{self, IoSliceMut};

/// Where a process has some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) address: u64,
    pub(super) len: u64,
}

impl Place {
    /// Of this process. The bytes must stay where they are for as long as others may read them.
    pub(super) fn of(bytes: &[u8]) -> Self {
        Self { address: bytes.as_ptr().expose_provenance() as u64, len: bytes.len() as u64 }
    }
}

#[cfg(target_os = "linux")]
pub(super) use linux::{Memory, allow};

#[cfg(not(target_os = "linux"))]
pub(super) use other::{Memory, allow};

#[cfg(target_os = "linux")]
mod linux {
    use nix::sys::uio::{RemoteIoVec, process_vm_readv};
    use nix::unistd::Pid;

    use super::*;

    /// The most slices that the operating system takes in one call.
    const SLICES_MAX: usize = 1024;

    /// The memory of a process of this machine.
    #[derive(Debug)]
    pub(in crate::tcp) struct Memory(Pid);

    impl Memory {
        /// Of the process with this number, as this process counts them.
        pub(in crate::tcp) fn of(process: u64) -> Option<Self> {
            i32::try_from(process).ok().filter(|&number| number > 0).map(|number| Self(Pid::from_raw(number)))
        }

        /// Reads what is at these places, one after the other, into slices that have room for as much.
        ///
        /// # Errors
        /// Those of the operating system: no such process, no such memory, not allowed.
        pub(in crate::tcp) fn read(
            &self,
            places: &[Place],
            mut into: &mut [IoSliceMut<'_>],
        ) -> io::Result<()> {
            let remote =
                |place: &Place| RemoteIoVec { base: place.address as usize, len: place.len as usize };
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

    /// Lets processes of the same user read the memory of this one, where a security module (Yama) keeps it to its
    /// ancestors.
    pub(in crate::tcp) fn allow() {
        // Without the module this is refused, and not needed.
        let _ = rustix::process::set_ptracer(rustix::process::PTracer::Any);
    }
}

#[cfg(not(target_os = "linux"))]
mod other {
    use super::*;

    /// There is none of which this is known.
    #[derive(Debug)]
    pub(in crate::tcp) enum Memory {}

    impl Memory {
        pub(in crate::tcp) fn of(_process: u64) -> Option<Self> {
            None
        }

        pub(in crate::tcp) fn read(&self, _places: &[Place], _into: &mut [IoSliceMut<'_>]) -> io::Result<()> {
            match *self {}
        }
    }

    pub(in crate::tcp) fn allow() {}
}
