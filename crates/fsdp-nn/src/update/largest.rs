//! The largest magnitudes that an update writes: they say whether all of it is finite, without a branch in the pass.

use fsdp_core::memory::Buffer;
use fsdp_core::update::SegmentShard;

use crate::host::element::Float;

/// Of parameters and of state.
#[derive(Clone, Copy)]
pub(super) struct Largest<A: Float> {
    params: A::Magnitude,
    state: A::Magnitude,
}

impl<A: Float> Largest<A> {
    /// Of nothing.
    pub(super) fn none() -> Self {
        Self { params: A::Magnitude::default(), state: A::Magnitude::default() }
    }

    /// What is finite in a shard, and in the copy that is made of its parameters.
    pub(super) fn finite<B: Buffer>(shard: &SegmentShard<'_, B>) -> Self {
        let most = |value| A::of(value).magnitude();
        Self { params: most(shard.largest_param()), state: most(A::DTYPE.largest()) }
    }

    /// A parameter was written.
    #[inline(always)]
    pub(super) fn param(&mut self, value: A) {
        self.params = self.params.max(value.magnitude());
    }

    /// A value of state was written.
    #[inline(always)]
    pub(super) fn state(&mut self, value: A) {
        self.state = self.state.max(value.magnitude());
    }

    /// Whether either is larger than in `most`.
    pub(super) fn exceeds(&self, most: &Self) -> bool {
        self.params > most.params || self.state > most.state
    }
}
