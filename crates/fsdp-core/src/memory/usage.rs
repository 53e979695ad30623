//! What buffers are for, and how many bytes of them are in use.

use std::fmt;

/// What a buffer is for; memory is predicted and counted by category.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Category {
    /// This rank's rows of the parameters: the master copy, and its low-precision copy when the two differ.
    ParameterShard,
    /// Slots that hold whole units while they compute, and sub-shards kept after forward.
    Unsharded,
    /// Slots that hold whole unreduced gradients of units.
    GradientSlot,
    /// This rank's rows of the reduced gradients.
    ShardedGradient,
    /// Partial sums of gradients over micro-batches.
    Accumulator,
    /// State of the update rule.
    OptimizerState,
    /// What forward saves for backward, and tensors that travel between blocks.
    Activation,
    /// Temporaries within one block.
    Workspace,
    /// Small buffers for the reduction of scalars and statistics.
    CommStaging,
    /// Slots on the device, through which shards and reduced gradients travel to and from the host.
    HostStaging,
}

impl Category {
    /// All categories, in report order.
    pub const ALL: [Category; Category::COUNT] = [
        Category::ParameterShard,
        Category::Unsharded,
        Category::GradientSlot,
        Category::ShardedGradient,
        Category::Accumulator,
        Category::OptimizerState,
        Category::Activation,
        Category::Workspace,
        Category::CommStaging,
        Category::HostStaging,
    ];

    /// How many there are.
    pub const COUNT: usize = 10;

    /// The name used in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Category::ParameterShard => "parameter shards",
            Category::Unsharded => "unsharded slots",
            Category::GradientSlot => "gradient slots",
            Category::ShardedGradient => "sharded gradients",
            Category::Accumulator => "accumulators",
            Category::OptimizerState => "optimizer state",
            Category::Activation => "activations",
            Category::Workspace => "workspace",
            Category::CommStaging => "communication staging",
            Category::HostStaging => "host copy staging",
        }
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Bytes in use of one kind of memory, by category, in the order of [`Category::ALL`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    /// Bytes allocated now.
    pub live_bytes: [usize; Category::COUNT],
    /// The most bytes that were allocated at once, per category (peaks of different categories need not
    /// coincide).
    pub peak_bytes: [usize; Category::COUNT],
    /// The most bytes of all categories together that were allocated at once.
    pub total_peak_bytes: usize,
}

impl Bytes {
    /// Bytes of a category that are allocated now.
    pub fn live(&self, category: Category) -> usize {
        self.live_bytes[category as usize]
    }

    /// The highest number of bytes of a category.
    pub fn peak(&self, category: Category) -> usize {
        self.peak_bytes[category as usize]
    }

    /// Counts bytes that are allocated.
    pub fn add(&mut self, category: Category, bytes: usize) {
        let slot = category as usize;
        self.live_bytes[slot] += bytes;
        self.peak_bytes[slot] = self.peak_bytes[slot].max(self.live_bytes[slot]);
        self.total_peak_bytes = self.total_peak_bytes.max(self.live_bytes.iter().sum());
    }

    /// Counts bytes that are freed.
    pub fn remove(&mut self, category: Category, bytes: usize) {
        self.live_bytes[category as usize] -= bytes;
    }

    /// Forgets the peaks: they are what is in use now.
    pub fn reset_peaks(&mut self) {
        (self.peak_bytes, self.total_peak_bytes) = (self.live_bytes, self.live_bytes.iter().sum());
    }
}

/// Memory in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// That of the device.
    pub device: Bytes,
    /// That of the host, as far as [`Memory::allocate_host`](super::Memory::allocate_host) took it.
    pub host: Bytes,
    /// How many times the backing allocator was asked for storage.
    pub allocations: u64,
}

impl Usage {
    /// Bytes of the device of a category that are allocated now.
    pub fn live(&self, category: Category) -> usize {
        self.device.live(category)
    }

    /// The highest number of bytes of the device of a category.
    pub fn peak(&self, category: Category) -> usize {
        self.device.peak(category)
    }
}
