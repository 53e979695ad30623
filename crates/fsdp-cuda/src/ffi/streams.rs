//! Streams, events, copies and launches.
//!
//! A stream takes ranges of live blocks; the drop of a block ensures that it is not freed while work uses it.
//! Conflicting accesses from two streams must be ordered with events by their caller.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{DriverError, result, sys};

use super::driver::{Function, Gpu, Range, log_failed_free};
use crate::device::StreamHandle;
use crate::error::DeviceError;

/// An ordered queue of work, ordered with other streams only by events.
#[derive(Debug)]
pub(crate) struct Stream {
    gpu: Arc<Gpu>,
    handle: usize,
}

/// Priority in scheduling thread blocks of different streams. Copies have no priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    /// After all others.
    Least,
    /// Before all others.
    Greatest,
}

/// The number of blocks, and of threads per block, of a kernel launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    pub(crate) blocks: (u32, u32),
    pub(crate) threads: u32,
}

impl Stream {
    /// Creates a stream on a device.
    pub(crate) fn new(gpu: &Arc<Gpu>, priority: Priority) -> Result<Self, DeviceError> {
        let range = gpu.call("cuCtxGetStreamPriorityRange", result::stream::get_priority_range);
        let (least, greatest) = range?;
        let number = match priority {
            Priority::Least => least,
            Priority::Greatest => greatest,
        };
        let kind = result::stream::StreamKind::NonBlocking;
        let create = || result::stream::create_with_priority(kind, number);
        let handle = gpu.call("cuStreamCreateWithPriority", create)? as usize;
        Ok(Self { gpu: Arc::clone(gpu), handle })
    }

    /// The handle for other libraries.
    pub(crate) fn handle(&self) -> StreamHandle {
        StreamHandle::new(self.raw().cast())
    }

    /// Copies bytes between ranges of equal length, in device or pinned memory.
    pub(crate) fn copy(&self, src: Range<'_>, dst: Range<'_>) -> Result<(), DeviceError> {
        assert_eq!(src.bytes(), dst.bytes(), "ranges of a copy have one length");
        if src.bytes() == 0 {
            return Ok(());
        }
        // SAFETY: both ranges belong to live blocks that the device can access, and have the given length; blocks wait
        // for the device before they are freed.
        let copy = || unsafe { sys::cuMemcpyAsync(dst.address(), src.address(), src.bytes(), self.raw()) };
        self.gpu.call("cuMemcpyAsync", || copy().result())
    }

    /// Fills a range with a byte.
    pub(crate) fn fill(&self, dst: Range<'_>, byte: u8) -> Result<(), DeviceError> {
        if dst.bytes() == 0 {
            return Ok(());
        }
        // SAFETY: as for `copy`.
        let fill = || unsafe { result::memset_d8_async(dst.address(), byte, dst.bytes(), self.raw()) };
        self.gpu.call("cuMemsetD8Async", fill)
    }

    /// Launches a kernel. Each of `args` holds a parameter in its low bytes (CUDA devices and hosts are little-endian).
    ///
    /// The caller must pass parameters that match the kernel: [`crate::kernels`] is the only caller, and defines both.
    pub(crate) fn launch(&self, kernel: Function, grid: Grid, args: &mut [u64]) -> Result<(), DeviceError> {
        let mut parameters: Vec<*mut c_void> = args.iter_mut().map(|arg| (&raw mut *arg).cast()).collect();
        let blocks = (grid.blocks.0, grid.blocks.1, 1);
        // SAFETY: the function belongs to a module that stays loaded; the driver copies the parameters before it
        // returns; their number and sizes match the kernel, because both are defined in `kernels`; addresses among them
        // belong to live blocks, which wait for the device before they are freed.
        self.gpu.call("cuLaunchKernel", || unsafe {
            let function = kernel.0 as sys::CUfunction;
            result::launch_kernel(function, blocks, (grid.threads, 1, 1), 0, self.raw(), &mut parameters)
        })
    }

    /// Records an event after all earlier work.
    pub(crate) fn record(&self, event: &Event) -> Result<(), DeviceError> {
        // SAFETY: stream and event are live, and of the same context.
        self.gpu.call("cuEventRecord", || unsafe { result::event::record(event.raw(), self.raw()) })
    }

    /// Orders later work after the latest recording of an event.
    pub(crate) fn wait(&self, event: &Event) -> Result<(), DeviceError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: stream and event are live.
        let wait = || unsafe { result::stream::wait_event(self.raw(), event.raw(), flags) };
        self.gpu.call("cuStreamWaitEvent", wait)
    }

    /// Blocks until all earlier work is done.
    pub(crate) fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the stream is live.
        self.gpu.call("cuStreamSynchronize", || unsafe { result::stream::synchronize(self.raw()) })
    }

    fn raw(&self) -> sys::CUstream {
        self.handle as sys::CUstream
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: it was created by `new` and is destroyed once; the driver finishes its work first.
        log_failed_free(self.gpu.call("cuStreamDestroy", || unsafe { result::stream::destroy(self.raw()) }));
    }
}

/// A point in the work of a stream; it can be recorded again.
#[derive(Debug)]
pub(crate) struct Event {
    gpu: Arc<Gpu>,
    handle: usize,
}

impl Event {
    /// Creates an event that is not recorded yet; if `timed`, the device stores the time when it happens.
    pub(crate) fn new(gpu: &Arc<Gpu>, timed: bool) -> Result<Self, DeviceError> {
        use sys::CUevent_flags as Flags;
        let flags = if timed { Flags::CU_EVENT_DEFAULT } else { Flags::CU_EVENT_DISABLE_TIMING };
        let event = gpu.call("cuEventCreate", || result::event::create(flags))?;
        Ok(Self { gpu: Arc::clone(gpu), handle: event as usize })
    }

    /// Blocks until the event has happened.
    pub(crate) fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the event is live.
        self.gpu.call("cuEventSynchronize", || unsafe { result::event::synchronize(self.raw()) })
    }

    /// Whether the event has happened.
    pub(crate) fn has_happened(&self) -> Result<bool, DeviceError> {
        // SAFETY: the event is live.
        self.gpu.call("cuEventQuery", || match unsafe { result::event::query(self.raw()) } {
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            other => other.map(|()| true),
        })
    }

    /// Milliseconds from this event to a later one; both must be timed and have happened.
    pub(crate) fn milliseconds_to(&self, later: &Event) -> Result<f32, DeviceError> {
        // SAFETY: both events are live; the driver rejects events that are not timed or have not happened.
        self.gpu.call("cuEventElapsedTime", || unsafe { result::event::elapsed(self.raw(), later.raw()) })
    }

    fn raw(&self) -> sys::CUevent {
        self.handle as sys::CUevent
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: it was created by `new` and is destroyed once; the driver allows this before the event has happened.
        log_failed_free(self.gpu.call("cuEventDestroy", || unsafe { result::event::destroy(self.raw()) }));
    }
}
