//! The largest magnitudes that an update writes. They show whether all values are finite, without a branch in the
//! pass.

use fsdp_core::memory::Buffer;
use fsdp_core::update::SegmentShard;

use crate::host::element::Float;

/// The largest magnitudes among parameters and state.
#[derive(Clone, Copy)]
pub(super) struct FiniteCheck<A: Float> {
    params: A::Magnitude,
    state: A::Magnitude,
}

impl<A: Float> FiniteCheck<A> {
    /// The initial magnitudes, all zero.
    pub(super) fn none() -> Self {
        Self { params: A::Magnitude::default(), state: A::Magnitude::default() }
    }

    /// The largest finite magnitudes of a shard, including the low-precision copy of its parameters, if any.
    pub(super) fn finite<B: Buffer>(shard: &SegmentShard<'_, B>) -> Self {
        let magnitude = |value| A::of(value).magnitude();
        Self { params: magnitude(shard.largest_param()), state: magnitude(A::DTYPE.largest()) }
    }

    /// Includes a written parameter.
    #[inline(always)]
    pub(super) fn param(&mut self, value: A) {
        self.params = self.params.max(value.magnitude());
    }

    /// Includes a written state value.
    #[inline(always)]
    pub(super) fn state(&mut self, value: A) {
        self.state = self.state.max(value.magnitude());
    }

    /// Whether either magnitude exceeds the one in `limits`.
    pub(super) fn exceeds(&self, limits: &Self) -> bool {
        self.params > limits.params || self.state > limits.state
    }
}
