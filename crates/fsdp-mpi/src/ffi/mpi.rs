//! MPI on the thread that owns it, and its operations in flight.

use std::ffi::{c_char, c_int};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr;

use super::functions::{Handle, Status, with};
use super::library::MpiLibrary;
use super::loan::Piece;
use super::message::{self, Blocks, Direction};
use crate::error::MpiError;

/// `MPI_MAX_ERROR_STRING`, the maximum over the families.
const ERROR_LEN: usize = 512;

/// Memory that a message is read from or written to.
pub(crate) enum Memory {
    /// Memory that the operation owns.
    Own(Vec<u8>),
    /// Pieces of a caller's memory, in order.
    Lent(Vec<Piece>),
}

impl Memory {
    fn readable(&self) -> Blocks {
        match self {
            Memory::Own(bytes) => Blocks::of([(bytes.as_ptr(), bytes.len())].into_iter()),
            Memory::Lent(pieces) => Blocks::of(pieces.iter().map(|piece| (piece.start(), piece.len()))),
        }
    }

    fn writable(&mut self) -> Blocks {
        match self {
            Memory::Own(bytes) => Blocks::of([(bytes.as_mut_ptr().cast_const(), bytes.len())].into_iter()),
            Memory::Lent(pieces) => {
                Blocks::of(pieces.iter().map(|piece| (piece.start_mut().cast_const(), piece.len())))
            }
        }
    }
}

/// An operation in flight. It keeps its memory until MPI has released it: if dropped earlier, it leaks the memory, so
/// that MPI never reads or writes memory that was reused.
pub(crate) struct Request {
    bits: usize,
    memory: ManuallyDrop<Memory>,
    ended: bool,
}

impl Request {
    /// Returns its own memory. `None` if the operation has not ended, or if the memory was lent.
    pub(crate) fn into_bytes(mut self) -> Option<Vec<u8>> {
        match &mut *self.memory {
            Memory::Own(bytes) if self.ended => Some(std::mem::take(bytes)),
            _ => None,
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if self.ended {
            // SAFETY: MPI has released the memory, and it is dropped only here.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}

/// MPI, initialized by this thread. The value cannot leave the thread, because `MPI_THREAD_FUNNELED` allows calls from
/// no other.
pub(crate) struct Mpi {
    library: MpiLibrary,
    rank: c_int,
    size: c_int,
    _of_this_thread: PhantomData<*const ()>,
}

impl Mpi {
    /// Initializes MPI, and makes failing calls return errors instead of ending the process.
    pub(crate) fn initialize(library: MpiLibrary) -> Result<Self, MpiError> {
        let mut mpi = Self { library, rank: 0, size: 0, _of_this_thread: PhantomData };
        let (functions, constants) = (&mpi.library.functions, &mpi.library.constants);
        let mut initialized = 0;
        // SAFETY: this may be called at any time; it writes one integer.
        let code = with!(functions, f => unsafe { (f.initialized)(&mut initialized) });
        mpi.check("MPI_Initialized", code)?;
        if initialized != 0 {
            return Err(MpiError::Initialized);
        }
        let mut provided = 0;
        // SAFETY: MPI was not initialized before; null is allowed for the program's arguments; it writes one integer.
        let code = with!(functions, f => unsafe {
            (f.init_thread)(ptr::null_mut(), ptr::null_mut(), constants.funneled, &mut provided)
        });
        mpi.check("MPI_Init_thread", code)?;
        if provided < constants.funneled {
            let path = mpi.library.path().to_owned();
            return Err(MpiError::Threads { path, provided, needed: constants.funneled });
        }
        // SAFETY: this thread has initialized MPI; both handles are constants of this library.
        let code = with!(functions, f => unsafe {
            (f.set_error_handler)(Handle::from_bits(constants.world), Handle::from_bits(constants.errors_return))
        });
        mpi.check("MPI_Comm_set_errhandler", code)?;
        mpi.query_rank_and_size()?;
        Ok(mpi)
    }

    /// Rank of this process in the world.
    pub(crate) fn rank(&self) -> c_int {
        self.rank
    }

    /// Number of processes in the world.
    pub(crate) fn size(&self) -> c_int {
        self.size
    }

    fn query_rank_and_size(&mut self) -> Result<(), MpiError> {
        let world = self.library.constants.world;
        let (mut rank, mut size) = (0, 0);
        let rank_code = with!(&self.library.functions, f => {
            // SAFETY: this thread has initialized MPI; the handle is a constant of this library; it writes one integer.
            unsafe { (f.rank)(Handle::from_bits(world), &mut rank) }
        });
        self.check("MPI_Comm_rank", rank_code)?;
        let size_code = with!(&self.library.functions, f => {
            // SAFETY: as for the rank.
            unsafe { (f.size)(Handle::from_bits(world), &mut size) }
        });
        self.check("MPI_Comm_size", size_code)?;
        (self.rank, self.size) = (rank, size);
        Ok(())
    }

    /// Starts to send a message.
    pub(crate) fn send(&self, memory: Memory, to: c_int, tag: c_int) -> Result<Request, MpiError> {
        let blocks = memory.readable();
        self.begin(Direction::Send, memory, &blocks, to, tag)
    }

    /// Starts to receive a message that is at most as long as the memory.
    pub(crate) fn receive(&self, mut memory: Memory, from: c_int, tag: c_int) -> Result<Request, MpiError> {
        let blocks = memory.writable();
        self.begin(Direction::Receive, memory, &blocks, from, tag)
    }

    fn begin(
        &self,
        direction: Direction,
        memory: Memory,
        blocks: &Blocks,
        peer: c_int,
        tag: c_int,
    ) -> Result<Request, MpiError> {
        let null = self.library.constants.request_null;
        let (mut bits, constants) = (null, &self.library.constants);
        let begun = with!(&self.library.functions, f => {
            // SAFETY: this thread has initialized MPI, and `f` and the constants belong to its library. The blocks
            // point into `memory` and were made for this direction; the request owns `memory` from here on, and does
            // not release it before MPI has. Until then the blocks stay in place, are not written, and are not read
            // while MPI writes them.
            unsafe { message::begin(f, constants, direction, blocks, peer, tag, &mut bits) }
        });
        // A failed call has started nothing, unless it left a request.
        let ended = begun.is_err() && bits == null;
        let request = Request { bits, memory: ManuallyDrop::new(memory), ended };
        match begun {
            Ok(()) => Ok(request),
            Err((call, code)) => self.check(call, code).map(|()| request),
        }
    }

    /// Whether an operation has ended. Also lets MPI make progress on all operations.
    pub(crate) fn test(&self, request: &mut Request) -> Result<bool, MpiError> {
        if request.ended {
            return Ok(true);
        }
        let (mut flag, mut status) = (0, Status::new());
        let code = with!(&self.library.functions, f => {
            let mut handle = Handle::from_bits(request.bits);
            // SAFETY: this thread has initialized MPI; the request belongs to this library and has not ended; the
            // status is large enough for all families.
            let code = unsafe { (f.test)(&mut handle, &mut flag, &mut status) };
            request.bits = handle.bits();
            code
        });
        // A failed operation has ended if MPI took its request away. If MPI left the request, it may still use the
        // memory.
        request.ended = request.bits == self.library.constants.request_null;
        self.check("MPI_Test", code).map(|()| request.ended)
    }

    /// Requests that a receive end. It still has to be tested; it ends at once unless its message is already coming in.
    pub(crate) fn cancel(&self, request: &mut Request) -> Result<(), MpiError> {
        if request.ended {
            return Ok(());
        }
        let code = with!(&self.library.functions, f => {
            let mut handle = Handle::from_bits(request.bits);
            // SAFETY: this thread has initialized MPI; the request belongs to this library and has not ended.
            unsafe { (f.cancel)(&mut handle) }
        });
        self.check("MPI_Cancel", code)
    }

    /// Lets MPI make progress on messages in its own buffers when there is no operation to test.
    pub(crate) fn progress(&self) -> Result<(), MpiError> {
        let (mut flag, mut status) = (0, Status::new());
        let (world, rank) = (self.library.constants.world, self.rank);
        // SAFETY: this thread has initialized MPI; the handle is a constant of this library; the outputs are as for
        // `test`. It probes for a message from this rank to itself, which never exists.
        let code = with!(&self.library.functions, f => unsafe {
            (f.probe)(rank, 0, Handle::from_bits(world), &mut flag, &mut status)
        });
        self.check("MPI_Iprobe", code)
    }

    /// Finalizes MPI, which waits for the other ranks to do the same. No operation may be in flight.
    pub(crate) fn finalize(self) -> Result<(), MpiError> {
        // SAFETY: this thread has initialized MPI, and no call follows, because this consumes `self`.
        let code = with!(&self.library.functions, f => unsafe { (f.finalize)() });
        if code == 0 { Ok(()) } else { Err(call_error("MPI_Finalize", code, String::new())) }
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), MpiError> {
        if code == 0 {
            return Ok(());
        }
        let (mut text, mut len) = (vec![0u8; ERROR_LEN], 0);
        let start: *mut c_char = text.as_mut_ptr().cast();
        // SAFETY: the code comes from this library; it writes no more bytes than `text` has.
        with!(&self.library.functions, f => unsafe { (f.error_string)(code, start, &mut len) });
        let text = String::from_utf8_lossy(text.split(|byte| *byte == 0).next().unwrap_or_default());
        Err(call_error(call, code, text.trim().to_owned()))
    }
}

fn call_error(call: &'static str, code: c_int, text: String) -> MpiError {
    MpiError::Call { call, code, text }
}
