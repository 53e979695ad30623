//! What happens when memory runs out where no error can report it.
//!
//! What is large is predicted, or allocated so that a failure is an error. Elsewhere (in libraries, for a few bytes)
//! Rust prints the size of the allocation and aborts the process. Here the abort of such a process becomes a sentence
//! and an exit code that asks a scheduler to try again. Nothing else may happen then: what it would need may be gone.

#[cfg(not(target_env = "musl"))]
use std::alloc::System as Heap;
use std::alloc::{GlobalAlloc, Layout};
#[cfg(all(target_os = "linux", target_env = "gnu"))]
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

#[cfg(target_env = "musl")]
use mimalloc::MiMalloc as Heap;
#[cfg(all(target_os = "linux", target_env = "gnu"))]
use rustix::process::{Resource, getrlimit};
use signal_hook::consts::SIGABRT;
use signal_hook::low_level;

use crate::error::CliError;
use crate::exit_code::Exit;

/// What a user reads; the line above it has the size of the allocation.
const SENTENCE: &[u8] =
    b"error: there is no more memory: free some, or raise the limit of this process (ulimit -v, a \
                          cgroup), and start again; --resume continues from the newest checkpoint\n";

/// Whether an allocation has failed. A failure that was reported as an error leaves it set, which matters only if the
/// process then aborts for another reason.
static HAS_FAILED: AtomicBool = AtomicBool::new(false);

/// The allocator of the system, whose failures are noted; with musl mimalloc, for that of musl has one lock for all threads.
pub(crate) struct Allocator;

#[inline(always)]
fn noted(memory: *mut u8) -> *mut u8 {
    // Not `is_null`: this crate is compiled with few optimizations, and would call it for every allocation.
    if memory as usize == 0 {
        HAS_FAILED.store(true, Ordering::Relaxed);
    }
    memory
}

// SAFETY: every function passes its arguments to the same function of another allocator, and returns its result.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps to the contract of this function, which is the same.
        noted(unsafe { Heap.alloc(layout) })
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { Heap.dealloc(memory, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        noted(unsafe { Heap.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        // SAFETY: as above.
        noted(unsafe { Heap.realloc(memory, layout, len) })
    }
}

/// Where the address space is limited, has all threads allocate from one heap. glibc reserves 64 MiB of address space
/// for the heap of each thread, and tries again at every allocation if there is no room for it: with a limit of some
/// 100 MiB, most of it is reserved and not used, and a run takes fifty times as long. Threads of a run allocate little
/// between two steps, so they seldom wait for each other.
pub(crate) fn share_heap_under_limit() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    if getrlimit(Resource::As).current.is_some() {
        /// `M_ARENA_MAX` of `malloc.h`.
        const ARENA_MAX: c_int = -8;
        set(ARENA_MAX, 1);
    }
}

/// Has the system take back at once what is freed of blocks of at least a megabyte. Otherwise glibc learns to keep blocks of up to
/// 32 MiB from those that are freed, and a layer that is done leaves them between others that are in use.
pub(crate) fn keep_no_large_blocks() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        /// `M_MMAP_THRESHOLD` of `malloc.h`.
        const MMAP_THRESHOLD: c_int = -3;
        set(MMAP_THRESHOLD, 1 << 20);
    }
}

/// Sets a number of the allocator of the system.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn set(parameter: c_int, value: c_int) {
    unsafe extern "C" {
        fn mallopt(parameter: c_int, value: c_int) -> c_int;
    }
    // SAFETY: the call sets a number, under the allocator's own lock, that later allocations read.
    unsafe { mallopt(parameter, value) };
}

/// From this call on, a process that aborts because an allocation has failed exits with [`Exit::Temporary`].
///
/// # Errors
/// [`CliError::Signal`].
pub(crate) fn exit_when_memory_runs_out() -> Result<(), CliError> {
    let end = || {
        if HAS_FAILED.load(Ordering::Relaxed) {
            // If nobody can read it, the exit code still says it.
            let _ = rustix::io::write(std::io::stderr(), SENTENCE);
            low_level::exit(Exit::Temporary.code().into());
        }
    };
    // SAFETY: the handler loads an atomic, writes a constant and exits, all of which a signal handler may do.
    let registered = unsafe { low_level::register(SIGABRT, end) };
    registered.map(drop).map_err(|source| CliError::Signal { source })
}
