//! What a benchmark needs of a device besides training: times of points in its queues, and memory in use.

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

    /// Device memory in use by this process and all others; `None` on the host.
    fn device_bytes(&self) -> Option<DeviceBytes> {
        None
    }

    /// The libtorch kernels that computed the last attention; `None` if libtorch did not.
    fn attention_kernels(&self) -> Option<&'static str> {
        None
    }
}

/// Device memory in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceBytes {
    /// In use, by all processes.
    pub(crate) used: u64,
    /// Peak bytes that this rank's engine memory obtained from the driver.
    pub(crate) arena_peak: u64,
    /// Peak bytes that libtorch's allocator obtained from the driver: temporaries, and workspaces of its libraries.
    pub(crate) libtorch_peak: u64,
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
mod torch {
    use fsdp_cuda::torch::Torch;

    use super::{Clock, DeviceBytes, Error, HostMemory, Instant, Queue};

    impl Clock for Torch<HostMemory> {
        type Mark = Instant;

        fn mark(&self, queue: Queue) -> Result<Instant, Error> {
            self.storage().mark(queue)
        }

        fn milliseconds(&self, from: &Instant, to: &Instant) -> Result<f64, Error> {
            self.storage().milliseconds(from, to)
        }
    }

    impl Clock for Torch<fsdp_cuda::CudaMemory> {
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

        fn device_bytes(&self) -> Option<DeviceBytes> {
            let (free, total) = self.storage().free_and_total_bytes().ok()?;
            let allocator = fsdp_cuda::torch::allocator_bytes(self.storage().device()).ok()?;
            Some(DeviceBytes {
                used: (total - free) as u64,
                arena_peak: self.storage().held_peak_bytes() as u64,
                libtorch_peak: allocator.reserved_peak,
            })
        }

        fn attention_kernels(&self) -> Option<&'static str> {
            fsdp_cuda::torch::attention_kernels()
        }
    }
}
