//! Element-wise update rules: each is one formula, which every device runs in its own way.
//!
//! The host compiles the formula for its numbers. Other devices get it as a list of calculations ([`Formula`]), of which
//! they make a kernel, a part of a compiled program, or calls of a library. The order of operations is the same
//! everywhere, and so are the bits, except on XLA.

use std::fmt::Debug;
use std::ops::{Add, Div, Mul, Sub};

use fsdp_core::Error;
use fsdp_core::model::ParamId;
use fsdp_core::update::SegmentShard;

use super::formula::{Formula, record};
use super::groups::{GroupSettings, Groups};
use super::host::{HostScalars, each_block};
use crate::host::{HostBuffer, HostMemory};

/// The largest number of state tensors of an element-wise rule.
pub const STATES_MAX: usize = 3;

/// What a formula calculates with: numbers of the master dtype, or the steps of a recorded formula.
pub trait Number:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// A constant, rounded to the master dtype.
    #[must_use]
    fn constant(self, value: f64) -> Self;

    /// The square root, correctly rounded.
    #[must_use]
    fn square_root(self) -> Self;

    /// `then` if this number is less than `other`; `otherwise` if it is not, or if one of them is NaN.
    #[must_use]
    fn if_less(self, other: Self, then: Self, otherwise: Self) -> Self;
}

macro_rules! number {
    ($($float:ty),*) => {$(
        impl Number for $float {
            #[inline(always)]
            fn constant(self, value: f64) -> Self {
                value as $float
            }

            #[inline(always)]
            fn square_root(self) -> Self {
                self.sqrt()
            }

            #[inline(always)]
            fn if_less(self, other: Self, then: Self, otherwise: Self) -> Self {
                if self < other { then } else { otherwise }
            }
        }
    )*};
}

number!(f32, f64);

/// Linear interpolation like PyTorch's `lerp` on CPUs: from the end for weights of at least one half.
#[inline(always)]
pub(super) fn lerp<N: Number>(from: N, to: N, weight: f64) -> N {
    let weight_of = from.constant(weight);
    if weight >= 0.5 {
        to - (to - from) * (from.constant(1.0) - weight_of)
    } else {
        from + weight_of * (to - from)
    }
}

/// A rule that treats each element by itself.
pub trait Elementwise: Clone + Debug + Send + Sync + 'static {
    /// Names of the state tensors, of which there are up to [`STATES_MAX`].
    fn state(&self) -> &'static [&'static str];

    /// The settings of parameters; `None` if they have no effect.
    fn groups(&self) -> Option<&Groups>;

    /// The numbers in which a step differs from other steps, or a parameter from other parameters: the same number of them
    /// for all steps and parameters. `step` and `lr` are the parameter's own: steps since it was first updated, and the
    /// learning rate with its scale.
    fn factors(&self, settings: GroupSettings, step: u64, lr: f64) -> Vec<f64>;

    /// Updates the state of an element (unused ones are to be left alone) and returns the new parameter. The gradient is
    /// that of the mean loss, clipped.
    fn step<N: Number>(&self, factors: &[N], gradient: N, param: N, state: &mut [N; STATES_MAX]) -> N;
}

/// [`Elementwise`] as an object.
pub trait ElementwiseRule: Debug + Send + Sync {
    /// As [`Elementwise::state`].
    fn state(&self) -> &'static [&'static str];

    /// As [`Elementwise::groups`].
    fn groups(&self) -> Option<&Groups>;

    /// The factors of a step of the run for a parameter: [`Elementwise::factors`].
    fn factors_of(&self, param: ParamId, step: u64, lr: f64) -> Vec<f64>;

    /// The formula, and the values of its constants.
    fn formula(&self) -> (Formula, Vec<f64>);

    /// Whether parameters change, or only state.
    fn changes_params(&self) -> bool {
        self.formula().0.param.is_some()
    }

    /// Updates parameters and state of a shard in host memory.
    ///
    /// # Errors
    /// Those of the memory.
    fn update_on_host(
        &self,
        memory: &HostMemory,
        shard: &mut SegmentShard<'_, HostBuffer>,
        scalars: &HostScalars,
    ) -> Result<(), Error>;
}

impl<R: Elementwise> ElementwiseRule for R {
    fn state(&self) -> &'static [&'static str] {
        Elementwise::state(self)
    }

    fn groups(&self) -> Option<&Groups> {
        Elementwise::groups(self)
    }

    fn factors_of(&self, param: ParamId, step: u64, lr: f64) -> Vec<f64> {
        let settings = Elementwise::groups(self).map_or(GroupSettings::PLAIN, |groups| groups.of(param));
        self.factors(settings, settings.own_step(step), lr * settings.lr_scale)
    }

    fn formula(&self) -> (Formula, Vec<f64>) {
        let factors = self.factors_of(ParamId(0), 1, 0.0).len();
        record(self, factors)
    }

    fn update_on_host(
        &self,
        memory: &HostMemory,
        shard: &mut SegmentShard<'_, HostBuffer>,
        scalars: &HostScalars,
    ) -> Result<(), Error> {
        each_block(self, memory, shard, scalars)
    }
}
