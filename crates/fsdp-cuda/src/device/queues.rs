//! The queues of a rank as streams, and events between them.
//!
//! Recording and waiting can not return errors, by contract. The first one is kept, and every later operation of
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

/// A point in the work of a queue, with the time at which the device came past it.
#[derive(Debug)]
pub struct TimedEvent(Event);

impl TimedEvent {
    /// Milliseconds from an earlier one, once this one has happened; blocks.
    ///
    /// # Errors
    /// [`DeviceError::Call`] when the device has failed.
    pub fn milliseconds_since(&self, earlier: &TimedEvent) -> Result<f32, DeviceError> {
        earlier.0.synchronize()?;
        self.0.synchronize()?;
        earlier.0.milliseconds_to(&self.0)
    }
}

/// Events that nobody holds, to be recorded again: a wait takes an event as it was when it was called.
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

    /// The first failure of an operation that could not return it.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }

    /// Marks the end of the work of a queue.
    pub(super) fn record(&self, queue: Queue) -> CudaEvent {
        let recorded = self.take_event().and_then(|event| {
            self.stream(queue).record(event.event())?;
            Ok(Arc::new(event))
        });
        CudaEvent(self.kept(recorded))
    }

    /// Marks the end of the work of a queue, to measure the time from or to it.
    pub(super) fn record_timed(&self, queue: Queue) -> Result<TimedEvent, DeviceError> {
        let event = Event::new(&self.events.gpu, true)?;
        self.stream(queue).record(&event)?;
        Ok(TimedEvent(event))
    }

    /// Orders later work of a queue behind an event.
    pub(super) fn wait(&self, queue: Queue, event: &CudaEvent) {
        if let Some(event) = &event.0 {
            self.kept(self.stream(queue).wait(event.event()));
        }
    }

    /// Keeps the error of an operation that can not return it.
    pub(super) fn kept<T>(&self, result: Result<T, DeviceError>) -> Option<T> {
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

/// A collective has few blocks, and on every device: behind a product's, which fill this one, all would wait for it. So
/// collectives start first, as those of PyTorch's FSDP do. Uploads and downloads are copies, which have no priority, or
/// kernels that reach over the bus: they would keep multiprocessors busy with waiting.
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
    /// Whether it has happened.
    pub(super) fn has_happened(&self) -> Result<bool, DeviceError> {
        self.0.as_ref().map_or(Ok(true), |event| event.event().has_happened())
    }

    /// Blocks the host until it has happened.
    pub(super) fn synchronize(&self) -> Result<(), DeviceError> {
        self.0.as_ref().map_or(Ok(()), |event| event.event().synchronize())
    }
}
