//! Ranks and queues.

use std::fmt;

/// A worker's number in the world, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub usize);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// An ordered stream of work on one rank. Work on one queue runs in order; work on different queues is ordered only
/// by explicit waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Queue {
    /// Forward, backward and updates.
    Compute,
    /// All-gathers of parameters.
    Gather,
    /// Reduce-scatters, accumulation of sharded gradients, their norms, and all-reduces.
    Reduce,
    /// Copies from the host to the device.
    Upload,
    /// Copies from the device to the host.
    Download,
}

impl Queue {
    /// All queues, in report order.
    pub const ALL: [Queue; 5] =
        [Queue::Compute, Queue::Gather, Queue::Reduce, Queue::Upload, Queue::Download];

    /// The name used in printed schedules and traces.
    pub const fn name(self) -> &'static str {
        match self {
            Queue::Compute => "compute",
            Queue::Gather => "gather",
            Queue::Reduce => "reduce",
            Queue::Upload => "upload",
            Queue::Download => "download",
        }
    }
}

impl fmt::Display for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
