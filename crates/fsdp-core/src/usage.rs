//! The purposes of buffers, and the bytes in use for each.

use std::fmt;

/// The purpose of a buffer; memory is predicted and counted by category.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Category {
    /// This rank's rows of the parameters: the master copy, and the low-precision copy if it differs.
    ParameterShard,
    /// Slots that hold unsharded units during compute, and sub-shards kept after forward.
    Unsharded,
    /// Slots that hold the unsharded, unreduced gradients of units.
    GradientSlot,
    /// This rank's rows of the reduced gradients.
    ShardedGradient,
    /// Partial sums of gradients over micro-batches.
    Accumulator,
    /// State of the update rule.
    OptimizerState,
    /// Tensors saved in forward for backward, and tensors passed between blocks.
    Activation,
    /// Temporaries within one block.
    Workspace,
    /// Small buffers for the reduction of scalars and statistics.
    CommStaging,
    /// Slots on the device through which shards and reduced gradients are copied from and to the host.
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

    /// Number of categories.
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
    /// Most bytes allocated at once, per category (different categories may peak at different times).
    pub peak_bytes: [usize; Category::COUNT],
    /// Most bytes of all categories together that were allocated at once.
    pub total_peak_bytes: usize,
}

impl Bytes {
    /// Bytes of a category that are currently allocated.
    pub fn live(&self, category: Category) -> usize {
        self.live_bytes[category as usize]
    }

    /// Peak bytes of a category.
    pub fn peak(&self, category: Category) -> usize {
        self.peak_bytes[category as usize]
    }

    /// Counts allocated bytes.
    pub fn add(&mut self, category: Category, bytes: usize) {
        let slot = category as usize;
        self.live_bytes[slot] += bytes;
        self.peak_bytes[slot] = self.peak_bytes[slot].max(self.live_bytes[slot]);
        self.total_peak_bytes = self.total_peak_bytes.max(self.live_bytes.iter().sum());
    }

    /// Counts freed bytes.
    pub fn remove(&mut self, category: Category, bytes: usize) {
        self.live_bytes[category as usize] -= bytes;
    }

    /// Resets the peaks to the bytes in use now.
    pub fn reset_peaks(&mut self) {
        (self.peak_bytes, self.total_peak_bytes) = (self.live_bytes, self.live_bytes.iter().sum());
    }
}

/// Memory in use by one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of device memory.
    pub device: Bytes,
    /// Bytes of host memory allocated by [`Memory::allocate_host`](crate::memory::Memory::allocate_host).
    pub host: Bytes,
    /// Number of requests to the backing allocator.
    pub allocations: u64,
}

impl Usage {
    /// Device bytes of a category that are currently allocated.
    pub fn live(&self, category: Category) -> usize {
        self.device.live(category)
    }

    /// Peak device bytes of a category.
    pub fn peak(&self, category: Category) -> usize {
        self.device.peak(category)
    }
}
