//! One communicator of NCCL: a handle, and the calls that may be made on it.

use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;

use fsdp_core::comm::CollectiveKind;
use fsdp_core::{DType, Queue};

use super::nccl::{Config, Handle, Nccl, Query, dtype_code, op_code};
use crate::device::DeviceMemory;
use crate::nccl::buffers::{Flying, IssueError, Segment, segments};
use crate::nccl::{Code, NcclError, Outcome};

/// Whether a communicator has done what was started on it.
#[derive(Debug)]
pub(crate) enum Progress {
    Ready,
    InProgress,
}

/// A communicator, for as long as it is neither destroyed nor aborted. Its methods take `&mut self`: one call at a time.
#[derive(Debug)]
pub(crate) struct RawComm {
    nccl: Arc<Nccl>,
    handle: usize,
}

/// A communicator that is being split off. If it is dropped before [`RawComm::finish_split`], its slot leaks: NCCL may
/// still write it.
pub(crate) struct Splitting {
    slot: ManuallyDrop<Box<Handle>>,
}

// SAFETY: the slot is a place on the heap that NCCL writes once and this crate reads afterwards; no thread is special.
unsafe impl Send for Splitting {}

impl RawComm {
    pub(super) fn new(nccl: Arc<Nccl>, handle: Handle) -> Self {
        Self { nccl, handle: handle as usize }
    }

    fn raw(&self) -> Handle {
        self.handle as Handle
    }

    /// Whether what was started has finished.
    ///
    /// # Errors
    /// What failed in the background, on this rank or another.
    pub(crate) fn poll(&mut self) -> Result<Progress, NcclError> {
        let mut state = 0;
        // SAFETY: the communicator exists (`destroy` and `abort` take it), and one integer is written.
        let code = unsafe { (self.nccl.table.async_error)(self.raw(), &mut state) };
        self.nccl.started("ncclCommGetAsyncError", code, self.raw())?;
        match Outcome::of(state) {
            Outcome::Done => Ok(Progress::Ready),
            Outcome::InProgress => Ok(Progress::InProgress),
            Outcome::Failed(known) => Err(self.nccl.error("asynchronous error", known, state, self.raw())),
        }
    }

    fn query(&mut self, call: &'static str, function: Query) -> Result<usize, NcclError> {
        let mut value = 0;
        // SAFETY: the communicator exists, and one integer is written.
        let code = unsafe { function(self.raw(), &mut value) };
        self.nccl.started(call, code, self.raw())?;
        Ok(usize::try_from(value).unwrap_or(usize::MAX))
    }

    /// Number of ranks, own rank and device, as NCCL sees them.
    pub(crate) fn facts(&mut self) -> Result<(usize, usize, usize), NcclError> {
        let (count, user_rank, device) =
            (self.nccl.table.count, self.nccl.table.user_rank, self.nccl.table.device);
        Ok((
            self.query("ncclCommCount", count)?,
            self.query("ncclCommUserRank", user_rank)?,
            self.query("ncclCommCuDevice", device)?,
        ))
    }

    /// Begins to split off a communicator; [`RawComm::poll`] of this one says when it is there.
    pub(crate) fn split(&mut self, color: c_int, key: c_int) -> Result<Splitting, NcclError> {
        let mut config = Config::non_blocking();
        let mut slot = ManuallyDrop::new(Box::new(ptr::null_mut()));
        // SAFETY: the communicator exists; the configuration is copied; the slot stays where it is until the split is
        // finished, and for ever if nobody finishes it.
        let code = unsafe {
            (self.nccl.table.split)(self.raw(), color, key, ptr::from_mut(&mut **slot), &mut config)
        };
        self.nccl.started("ncclCommSplit", code, self.raw())?;
        Ok(Splitting { slot })
    }

    /// Takes the new communicator, after [`RawComm::poll`] said that this one is ready.
    pub(crate) fn finish_split(&mut self, splitting: Splitting) -> Result<RawComm, NcclError> {
        let slot = ManuallyDrop::into_inner(splitting.slot);
        // SAFETY: the slot was initialised, and NCCL is done with it. (Volatile: NCCL wrote it from another thread; its
        // acquire load of the state came before.)
        let handle = unsafe { ptr::read_volatile(&*slot) };
        if handle.is_null() {
            let code = Code::InternalError;
            return Err(self.nccl.error("ncclCommSplit", code, 3, self.raw()));
        }
        Ok(RawComm::new(self.nccl.clone(), handle))
    }

    /// Issues one collective over all segments, in one group, on the stream of `queue`; segments without elements are
    /// left out, and a call without any issues nothing. Lengths and dtypes were checked by [`fsdp_core::comm::Comm`].
    ///
    /// # Errors
    /// The memory's or NCCL's; what was issued until then may run.
    pub(crate) fn issue<M: DeviceMemory>(
        &mut self,
        memory: &M,
        queue: Queue,
        kind: CollectiveKind,
        dtype: DType,
        buffers: &mut Flying<M::Buffer>,
    ) -> Result<(), IssueError> {
        let segments = segments(memory, queue, kind, buffers)?;
        if segments.is_empty() {
            return Ok(());
        }
        let (table, stream, dtype) = (&self.nccl.table, memory.stream(queue).as_ptr(), dtype_code(dtype));
        // SAFETY: no arguments.
        self.nccl.started("ncclGroupStart", unsafe { (table.group_start)() }, self.raw())?;
        let mut failed = None;
        for &Segment { from, to, count } in &segments {
            let (from, to) = (from as *const c_void, to as *mut c_void);
            // SAFETY: the addresses are those of live buffers of at least the lengths that NCCL derives from `count`
            // (`segments` takes it from the shorter side; `Comm` checked that the longer one is `size` times as long);
            // `Flying` keeps them from being freed; the stream is the memory's, which outlives its collectives.
            let code = unsafe {
                match kind {
                    CollectiveKind::AllGather => {
                        (table.all_gather)(from, to, count, dtype, self.raw(), stream)
                    }
                    CollectiveKind::ReduceScatter(op) => {
                        (table.reduce_scatter)(from, to, count, dtype, op_code(op), self.raw(), stream)
                    }
                    CollectiveKind::Broadcast { root } => {
                        // A place in a group of ranks, which NCCL counts in integers.
                        (table.broadcast)(from, to, count, dtype, root as c_int, self.raw(), stream)
                    }
                    CollectiveKind::AllReduce(op) => {
                        (table.all_reduce)(from, to, count, dtype, op_code(op), self.raw(), stream)
                    }
                    CollectiveKind::Split | CollectiveKind::Connect => {
                        unreachable!("only buffers are issued")
                    }
                }
            };
            failed = failed.or(self.nccl.started(name(kind), code, self.raw()).err());
        }
        // A group that was started is always ended, or later calls of this thread would join it.
        // SAFETY: no arguments.
        let ended = self.nccl.started("ncclGroupEnd", unsafe { (table.group_end)() }, self.raw());
        failed.map_or(ended, Err).map_err(IssueError::Nccl)
    }

    /// Begins to flush and close.
    pub(crate) fn finalize(&mut self) -> Result<(), NcclError> {
        // SAFETY: the communicator exists.
        let code = unsafe { (self.nccl.table.finalize)(self.raw()) };
        self.nccl.started("ncclCommFinalize", code, self.raw())
    }

    /// Frees what is left, after [`RawComm::poll`] said that it is finalized.
    pub(crate) fn destroy(self) -> Result<(), NcclError> {
        // SAFETY: the communicator exists, and nobody can use it afterwards.
        let code = unsafe { (self.nccl.table.destroy)(self.raw()) };
        self.nccl.started("ncclCommDestroy", code, ptr::null_mut())
    }

    /// Ends everything that is running on these communicators, and frees them. In one group: since NCCL 2.22 all are told
    /// to end before the first is freed; before that, a group frees one after the other. Freeing waits for the device, and so for kernels of communicators that were not
    /// told yet, which wait for each other's ranks.
    ///
    /// # Errors
    /// The first failure; all are tried.
    pub(crate) fn abort_all(comms: Vec<RawComm>) -> Result<(), NcclError> {
        let Some(nccl) = comms.first().map(|comm| Arc::clone(&comm.nccl)) else { return Ok(()) };
        // SAFETY: no arguments.
        nccl.started("ncclGroupStart", unsafe { (nccl.table.group_start)() }, ptr::null_mut())?;
        let mut failed = None;
        for comm in comms {
            // SAFETY: the communicator exists, and nobody can use it afterwards.
            let code = unsafe { (nccl.table.abort)(comm.raw()) };
            failed = failed.or(nccl.started("ncclCommAbort", code, ptr::null_mut()).err());
        }
        // SAFETY: no arguments.
        let ended = nccl.started("ncclGroupEnd", unsafe { (nccl.table.group_end)() }, ptr::null_mut());
        failed.map_or(ended, Err)
    }
}

fn name(kind: CollectiveKind) -> &'static str {
    match kind {
        CollectiveKind::AllGather => "ncclAllGather",
        CollectiveKind::ReduceScatter(_) => "ncclReduceScatter",
        CollectiveKind::Broadcast { .. } => "ncclBroadcast",
        _ => "ncclAllReduce",
    }
}
