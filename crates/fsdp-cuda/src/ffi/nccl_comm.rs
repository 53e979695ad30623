//! An NCCL communicator: its handle and the calls on it.

use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;

use fsdp_core::Queue;
use fsdp_core::comm::CollectiveKind;

use super::nccl::{Config, Handle, Nccl, Query, dtype_code, op_code};
use crate::device::DeviceMemory;
use crate::nccl::buffers::{InFlightBuffers, IssueError, Segment, segments};
use crate::nccl::{Code, NcclError};

/// Whether the started operation of a communicator has finished.
#[derive(Debug)]
pub(crate) enum Progress {
    Ready,
    InProgress,
}

/// A communicator that was neither destroyed nor aborted. Its methods take `&mut self`: one call at a time.
#[derive(Debug)]
pub(crate) struct RawComm {
    nccl: Arc<Nccl>,
    handle: usize,
}

/// A communicator being split off. If it is dropped before [`RawComm::finish_split`], its slot leaks, because NCCL may
/// still write to it.
pub(crate) struct Splitting {
    slot: ManuallyDrop<Box<Handle>>,
}

// SAFETY: the slot is a heap location that NCCL writes once and this crate reads afterwards, from any thread.
unsafe impl Send for Splitting {}

impl RawComm {
    pub(super) fn new(nccl: Arc<Nccl>, handle: Handle) -> Self {
        Self { nccl, handle: handle as usize }
    }

    fn raw(&self) -> Handle {
        self.handle as Handle
    }

    /// Whether the started operation has finished.
    ///
    /// # Errors
    /// The asynchronous error, of this rank or another.
    pub(crate) fn poll(&mut self) -> Result<Progress, NcclError> {
        let mut state = 0;
        // SAFETY: the communicator exists (`destroy` and `abort_all` consume it), and one integer is written.
        let code = unsafe { (self.nccl.table.async_error)(self.raw(), &mut state) };
        self.nccl.check_started("ncclCommGetAsyncError", code, self.raw())?;
        match Code(state) {
            Code::SUCCESS => Ok(Progress::Ready),
            Code::IN_PROGRESS => Ok(Progress::InProgress),
            failed => Err(self.nccl.error("asynchronous error", failed, self.raw())),
        }
    }

    fn query(&mut self, call: &'static str, function: Query) -> Result<usize, NcclError> {
        let mut value = 0;
        // SAFETY: the communicator exists, and one integer is written.
        let code = unsafe { function(self.raw(), &mut value) };
        self.nccl.check_started(call, code, self.raw())?;
        Ok(usize::try_from(value).unwrap_or(usize::MAX))
    }

    /// Number of ranks, own rank and device, as NCCL sees them.
    pub(crate) fn size_rank_device(&mut self) -> Result<(usize, usize, usize), NcclError> {
        let size = self.query("ncclCommCount", self.nccl.table.count)?;
        let rank = self.query("ncclCommUserRank", self.nccl.table.user_rank)?;
        Ok((size, rank, self.query("ncclCommCuDevice", self.nccl.table.device)?))
    }

    /// Starts splitting off a communicator; [`RawComm::poll`] on this one tells when it is done.
    pub(crate) fn split(&mut self, color: c_int, key: c_int) -> Result<Splitting, NcclError> {
        let mut config = Config::non_blocking();
        let mut slot = ManuallyDrop::new(Box::new(ptr::null_mut()));
        // SAFETY: the communicator exists; the configuration is copied; the slot stays in place until the split is
        // finished, or forever if it never is.
        let code = unsafe {
            (self.nccl.table.split)(self.raw(), color, key, ptr::from_mut(&mut **slot), &mut config)
        };
        self.nccl.check_started("ncclCommSplit", code, self.raw())?;
        Ok(Splitting { slot })
    }

    /// Takes the new communicator, after [`RawComm::poll`] has returned ready for this one.
    pub(crate) fn finish_split(&mut self, splitting: Splitting) -> Result<RawComm, NcclError> {
        let slot = ManuallyDrop::into_inner(splitting.slot);
        // SAFETY: the slot was initialized, and NCCL is done with it. (Volatile: NCCL wrote it from another thread; its
        // acquire load of the state came before.)
        let handle = unsafe { ptr::read_volatile(&*slot) };
        if handle.is_null() {
            return Err(self.nccl.error("ncclCommSplit", Code::INTERNAL_ERROR, self.raw()));
        }
        Ok(RawComm::new(self.nccl.clone(), handle))
    }

    /// Issues one collective over all segments, in one group, on the stream of `queue`; empty segments are skipped, and
    /// a call without elements issues nothing. [`fsdp_core::comm::Comm`] has checked lengths and dtypes; the
    /// communicator has `ranks` ranks.
    ///
    /// # Errors
    /// The errors of the memory or NCCL; operations issued before may still run.
    pub(crate) fn issue<M: DeviceMemory>(
        &mut self,
        memory: &M,
        queue: Queue,
        ranks: usize,
        kind: CollectiveKind,
        buffers: &mut InFlightBuffers<M::Buffer>,
    ) -> Result<(), IssueError> {
        let segments = segments(memory, queue, kind, buffers)?;
        if segments.is_empty() {
            return Ok(());
        }
        let (table, comm, stream) = (&self.nccl.table, self.raw(), memory.stream(queue).as_ptr());
        // NCCL has no all-to-all before 2.28.
        let all_to_all = |&Segment { from, to, count, dtype }: &Segment| {
            let (part, size_bytes, dtype) = (count / ranks, dtype.size_bytes(), dtype_code(dtype));
            (0..ranks).try_for_each(|peer| {
                let offset = (peer * part * size_bytes) as u64;
                let (from, to) = ((from + offset) as *const c_void, (to + offset) as *mut c_void);
                // The position in the group, which NCCL takes as an integer.
                let peer = peer as c_int;
                // SAFETY: as below; both buffers have `ranks` parts of `part` elements, one of which begins here.
                let codes = unsafe {
                    let sent = (table.send)(from, part, dtype, peer, comm, stream);
                    [("ncclSend", sent), ("ncclRecv", (table.receive)(to, part, dtype, peer, comm, stream))]
                };
                codes.into_iter().try_for_each(|(name, code)| self.nccl.check_started(name, code, comm))
            })
        };
        let call = |&Segment { from, to, count, dtype }: &Segment| {
            let (from, to, dtype) = (from as *const c_void, to as *mut c_void, dtype_code(dtype));
            // SAFETY: the addresses belong to live buffers of at least the lengths that NCCL derives from `count`
            // (`segments` takes it from the shorter side; `Comm` has checked that the longer side is `size` times as
            // long); `InFlightBuffers` keeps them from being freed; the stream is the memory's, which outlives its
            // collectives.
            let (name, code) = unsafe {
                match kind {
                    CollectiveKind::AllGather => {
                        ("ncclAllGather", (table.all_gather)(from, to, count, dtype, comm, stream))
                    }
                    CollectiveKind::ReduceScatter(op) => {
                        let op = op_code(op, ranks);
                        (
                            "ncclReduceScatter",
                            (table.reduce_scatter)(from, to, count, dtype, op, comm, stream),
                        )
                    }
                    CollectiveKind::AllReduce(op) => {
                        let op = op_code(op, ranks);
                        ("ncclAllReduce", (table.all_reduce)(from, to, count, dtype, op, comm, stream))
                    }
                    CollectiveKind::Broadcast { root } => {
                        // The position in the group, which NCCL takes as an integer.
                        let root = root as c_int;
                        ("ncclBroadcast", (table.broadcast)(from, to, count, dtype, root, comm, stream))
                    }
                    CollectiveKind::AllToAll | CollectiveKind::Split | CollectiveKind::Connect => {
                        unreachable!("it is no single call on buffers")
                    }
                }
            };
            self.nccl.check_started(name, code, comm)
        };
        let issue = |segment: &Segment| match kind {
            CollectiveKind::AllToAll => all_to_all(segment),
            _ => call(segment),
        };
        Ok(self.nccl.group(comm, || segments.iter().map(issue).fold(Ok(()), Result::and))?)
    }

    /// Starts flushing and closing the communicator.
    pub(crate) fn finalize(&mut self) -> Result<(), NcclError> {
        // SAFETY: the communicator exists.
        let code = unsafe { (self.nccl.table.finalize)(self.raw()) };
        self.nccl.check_started("ncclCommFinalize", code, self.raw())
    }

    /// Frees the communicator, after [`RawComm::poll`] has reported that it is finalized.
    pub(crate) fn destroy(self) -> Result<(), NcclError> {
        // SAFETY: the communicator exists, and is consumed here.
        let code = unsafe { (self.nccl.table.destroy)(self.raw()) };
        self.nccl.check_started("ncclCommDestroy", code, ptr::null_mut())
    }

    /// Aborts all operations on these communicators, and frees them. In one group: since NCCL 2.22, all communicators
    /// are told to stop before the first is freed; earlier versions free one after the other. Freeing waits for the
    /// device, and thus for kernels of communicators that were not told yet, which wait for each other's ranks.
    ///
    /// # Errors
    /// The first failure; all communicators are tried.
    pub(crate) fn abort_all(comms: Vec<RawComm>) -> Result<(), NcclError> {
        let Some(nccl) = comms.first().map(|comm| Arc::clone(&comm.nccl)) else { return Ok(()) };
        let abort = |comm: RawComm| {
            // SAFETY: the communicator exists, and is consumed here.
            let code = unsafe { (nccl.table.abort)(comm.raw()) };
            nccl.check_started("ncclCommAbort", code, ptr::null_mut())
        };
        nccl.group(ptr::null_mut(), || comms.into_iter().map(abort).fold(Ok(()), Result::and))
    }
}
