//! The queues of a rank as streams, and events between them.
//!
//! By contract, recording and waiting cannot return errors. The first such error is kept, and every later operation of
//! the memory returns it.

use std::sync::{Arc, Mutex, OnceLock};

use fsdp_core::Queue;

use super::lock::lock;
use crate::error::DeviceError;
use crate::ffi::driver::Gpu;
use crate::ffi::streams::{Event, Priority, Stream};

/// A point in the work of a queue of a [`CudaMemory`](super::CudaMemory).
#[derive(Clone, Debug)]
pub struct CudaEvent(Option<Arc<PooledEvent>>);

/// A point in the work of a queue, with the time at which the device reached it.
#[derive(Debug)]
pub struct TimedEvent(Event);

impl TimedEvent {
    /// Milliseconds since an earlier event; blocks until both have happened.
    ///
    /// # Errors
    /// [`DeviceError::Call`] if the device has failed.
    pub fn milliseconds_since(&self, earlier: &TimedEvent) -> Result<f32, DeviceError> {
        earlier.0.synchronize()?;
        self.0.synchronize()?;
        earlier.0.milliseconds_to(&self.0)
    }
}

/// Unused events for reuse. Reuse is safe because a wait takes the state of an event at the time of the call.
#[derive(Debug)]
struct EventPool {
    gpu: Arc<Gpu>,
    free: Mutex<Vec<Event>>,
}

#[derive(Debug)]
struct PooledEvent {
    event: Option<Event>,
    pool: Arc<EventPool>,
}

impl Drop for PooledEvent {
    fn drop(&mut self) {
        lock(&self.pool.free).extend(self.event.take());
    }
}

/// The streams of one rank.
#[derive(Debug)]
pub(crate) struct Queues {
    streams: [Stream; Queue::ALL.len()],
    events: Arc<EventPool>,
    failure: OnceLock<DeviceError>,
}

impl Queues {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<Self, DeviceError> {
        let [a, b, c, d, e] = Queue::ALL.map(|queue| Stream::new(gpu, priority(queue)));
        let streams = [a?, b?, c?, d?, e?];
        let events = Arc::new(EventPool { gpu: Arc::clone(gpu), free: Mutex::default() });
        Ok(Self { streams, events, failure: OnceLock::new() })
    }

    /// The stream of a queue.
    pub(crate) fn stream(&self, queue: Queue) -> &Stream {
        &self.streams[queue as usize]
    }

    /// Returns the first error of an operation that could not return it.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }

    /// Records an event after all earlier work on a queue.
    pub(super) fn record(&self, queue: Queue) -> CudaEvent {
        let recorded = self.take_event().and_then(|event| {
            self.stream(queue).record(event.event())?;
            Ok(Arc::new(event))
        });
        CudaEvent(self.keep_error(recorded))
    }

    /// Records a timed event after all earlier work on a queue.
    pub(super) fn record_timed(&self, queue: Queue) -> Result<TimedEvent, DeviceError> {
        let event = Event::new(&self.events.gpu, true)?;
        self.stream(queue).record(&event)?;
        Ok(TimedEvent(event))
    }

    /// Orders later work on a queue after an event.
    pub(super) fn wait(&self, queue: Queue, event: &CudaEvent) {
        if let Some(event) = &event.0 {
            self.keep_error(self.stream(queue).wait(event.event()));
        }
    }

    /// Keeps the error of an operation that cannot return it; `None` if it failed.
    pub(super) fn keep_error<T>(&self, result: Result<T, DeviceError>) -> Option<T> {
        result.map_err(|error| self.failure.get_or_init(|| error).clone()).ok()
    }

    fn take_event(&self) -> Result<PooledEvent, DeviceError> {
        let free = lock(&self.events.free).pop();
        let event = match free {
            Some(event) => event,
            None => Event::new(&self.events.gpu, false)?,
        };
        Ok(PooledEvent { event: Some(event), pool: Arc::clone(&self.events) })
    }
}

/// Collectives have few blocks, and need them on every device: if they queued behind the blocks of a matrix product,
/// which fill a device, all ranks would wait. So collectives get the higher priority, as in PyTorch's FSDP. Uploads and
/// downloads are copies, which have no priority, or kernels that access host memory over the bus, which would keep
/// multiprocessors busy waiting.
fn priority(queue: Queue) -> Priority {
    match queue {
        Queue::Gather | Queue::Reduce => Priority::Greatest,
        Queue::Compute | Queue::Upload | Queue::Download => Priority::Least,
    }
}

impl PooledEvent {
    fn event(&self) -> &Event {
        self.event.as_ref().expect("an event is given back when it is dropped")
    }
}

impl CudaEvent {
    /// Whether the event has happened.
    pub(super) fn has_happened(&self) -> Result<bool, DeviceError> {
        self.0.as_ref().map_or(Ok(true), |event| event.event().has_happened())
    }

    /// Blocks the host until the event has happened.
    pub(super) fn synchronize(&self) -> Result<(), DeviceError> {
        self.0.as_ref().map_or(Ok(()), |event| event.event().synchronize())
    }
}
