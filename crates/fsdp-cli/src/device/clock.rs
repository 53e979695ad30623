//! What calibration needs of a device besides training: times of points in its queues.

use std::time::Instant;

use fsdp_core::{Error, Memory, Queue};
use fsdp_nn::HostMemory;

/// A memory whose queues can be timed.
pub(crate) trait Clock: Memory {
    /// A point in a queue's work, with the time at which it is reached.
    type Mark: Send + 'static;

    /// Marks the end of the work issued to a queue so far.
    ///
    /// # Errors
    /// Those of the device.
    fn mark(&self, queue: Queue) -> Result<Self::Mark, Error>;

    /// Milliseconds between two marks; waits until both are reached.
    ///
    /// # Errors
    /// Those of the device.
    fn milliseconds(&self, from: &Self::Mark, to: &Self::Mark) -> Result<f64, Error>;

    /// The device's own name, if it has one.
    fn device_name(&self) -> Option<String> {
        None
    }
}

impl Clock for HostMemory {
    type Mark = Instant;

    fn mark(&self, _queue: Queue) -> Result<Instant, Error> {
        Ok(Instant::now())
    }

    fn milliseconds(&self, from: &Instant, to: &Instant) -> Result<f64, Error> {
        Ok(to.duration_since(*from).as_secs_f64() * 1e3)
    }
}

#[cfg(feature = "torch")]
impl Clock for fsdp_cuda::torch::Torch<HostMemory> {
    type Mark = Instant;

    fn mark(&self, queue: Queue) -> Result<Instant, Error> {
        self.storage().mark(queue)
    }

    fn milliseconds(&self, from: &Instant, to: &Instant) -> Result<f64, Error> {
        self.storage().milliseconds(from, to)
    }
}

#[cfg(feature = "cuda")]
impl Clock for fsdp_cuda::torch::Torch<fsdp_cuda::CudaMemory> {
    type Mark = fsdp_cuda::TimedEvent;

    fn mark(&self, queue: Queue) -> Result<Self::Mark, Error> {
        Ok(self.storage().record_timed(queue)?)
    }

    fn milliseconds(&self, from: &Self::Mark, to: &Self::Mark) -> Result<f64, Error> {
        Ok(f64::from(to.milliseconds_since(from)?))
    }

    fn device_name(&self) -> Option<String> {
        Some(self.storage().name().to_owned())
    }
}

#[cfg(feature = "xla")]
impl Clock for fsdp_xla::XlaMemory {
    type Mark = Instant;

    fn mark(&self, _queue: Queue) -> Result<Instant, Error> {
        Ok(Instant::now())
    }

    fn milliseconds(&self, from: &Instant, to: &Instant) -> Result<f64, Error> {
        Ok(to.duration_since(*from).as_secs_f64() * 1e3)
    }
}
