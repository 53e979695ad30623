//! Streams, events, copies and launches.
//!
//! A stream takes ranges of live blocks; that a block is not freed while work uses it is seen to where it is dropped.
//! What two streams do to one range is ordered by whoever gives them the work, with events.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{DriverError, result, sys};

use super::driver::{Function, Gpu, Range, ended};
use crate::device::StreamHandle;
use crate::error::DeviceError;

/// An ordered queue of work that nothing but events orders with others.
#[derive(Debug)]
pub(crate) struct Stream {
    gpu: Arc<Gpu>,
    handle: usize,
}

/// Whose blocks the device starts first, where several streams have some. Copies have no priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    /// Behind all others.
    Least,
    /// Before all others.
    Greatest,
}

/// How many blocks of how many threads run a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    pub(crate) blocks: (u32, u32),
    pub(crate) threads: u32,
}

impl Stream {
    /// A new stream of a device.
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

    /// What other libraries call it.
    pub(crate) fn handle(&self) -> StreamHandle {
        StreamHandle::new(self.raw().cast())
    }

    /// Copies bytes between ranges of equal length, of device or pinned memory.
    pub(crate) fn copy(&self, src: Range<'_>, dst: Range<'_>) -> Result<(), DeviceError> {
        assert_eq!(src.bytes(), dst.bytes(), "ranges of a copy have one length");
        if src.bytes() == 0 {
            return Ok(());
        }
        // SAFETY: both ranges are of live blocks that the device can reach, of the length given; blocks wait for the
        // device before they are freed.
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

    /// Runs a kernel. Every word holds one parameter in its low bytes (devices and hosts of CUDA are little-endian).
    ///
    /// The caller answers for parameters that fit the kernel: [`crate::kernels`] is the only one, and makes both.
    pub(crate) fn launch(&self, kernel: Function, grid: Grid, words: &mut [u64]) -> Result<(), DeviceError> {
        let mut parameters: Vec<*mut c_void> = words.iter_mut().map(|word| (&raw mut *word).cast()).collect();
        let blocks = (grid.blocks.0, grid.blocks.1, 1);
        // SAFETY: the function is of a module that stays loaded; the driver copies the parameters before it returns,
        // and there are as many of the right size as the kernel has, because both are written in `kernels`; addresses
        // among them are of live blocks, which wait for the device before they are freed.
        self.gpu.call("cuLaunchKernel", || unsafe {
            let function = kernel.0 as sys::CUfunction;
            result::launch_kernel(function, blocks, (grid.threads, 1, 1), 0, self.raw(), &mut parameters)
        })
    }

    /// Marks the end of the work so far.
    pub(crate) fn record(&self, event: &Event) -> Result<(), DeviceError> {
        // SAFETY: stream and event are live, of the same context.
        self.gpu.call("cuEventRecord", || unsafe { result::event::record(event.raw(), self.raw()) })
    }

    /// Orders later work behind an event, as it was recorded last.
    pub(crate) fn wait(&self, event: &Event) -> Result<(), DeviceError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: stream and event are live.
        let wait = || unsafe { result::stream::wait_event(self.raw(), event.raw(), flags) };
        self.gpu.call("cuStreamWaitEvent", wait)
    }

    /// Blocks until the work so far is done.
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
        ended(self.gpu.call("cuStreamDestroy", || unsafe { result::stream::destroy(self.raw()) }));
    }
}

/// A point in the work of a stream; it can be recorded again.
#[derive(Debug)]
pub(crate) struct Event {
    gpu: Arc<Gpu>,
    handle: usize,
}

impl Event {
    /// An event that was not recorded yet; with `timed`, the device notes when it happens.
    pub(crate) fn new(gpu: &Arc<Gpu>, timed: bool) -> Result<Self, DeviceError> {
        use sys::CUevent_flags as Flags;
        let flags = if timed { Flags::CU_EVENT_DEFAULT } else { Flags::CU_EVENT_DISABLE_TIMING };
        let event = gpu.call("cuEventCreate", || result::event::create(flags))?;
        Ok(Self { gpu: Arc::clone(gpu), handle: event as usize })
    }

    /// Blocks until it has happened.
    pub(crate) fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the event is live.
        self.gpu.call("cuEventSynchronize", || unsafe { result::event::synchronize(self.raw()) })
    }

    /// Whether it has happened.
    pub(crate) fn has_happened(&self) -> Result<bool, DeviceError> {
        // SAFETY: the event is live.
        self.gpu.call("cuEventQuery", || match unsafe { result::event::query(self.raw()) } {
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            other => other.map(|()| true),
        })
    }

    /// Milliseconds from this event to a later one; both are timed and have happened.
    pub(crate) fn milliseconds_to(&self, later: &Event) -> Result<f32, DeviceError> {
        // SAFETY: both events are live; the driver refuses events that are not timed or have not happened.
        self.gpu.call("cuEventElapsedTime", || unsafe { result::event::elapsed(self.raw(), later.raw()) })
    }

    fn raw(&self) -> sys::CUevent {
        self.handle as sys::CUevent
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: it was created by `new` and is destroyed once; the driver allows that before it has happened.
        ended(self.gpu.call("cuEventDestroy", || unsafe { result::event::destroy(self.raw()) }));
    }
}
