//! A model with adapters for its linear maps.

use fsdp_core::Error;
use fsdp_core::model::BlockId;

use super::Architecture;
use crate::graph::{Builder, Tensor};
use crate::layer::{Description, Head};

/// A model whose description may have been adapted ([`Description::adapt`]). The [`Builder`] adds the computation of
/// adapters wherever the model's code uses a linear map, so models need no code for them.
#[derive(Clone, Debug)]
pub struct Adapted<A> {
    base: A,
    description: Description,
}

impl<A: Architecture> Adapted<A> {
    /// Combines a model with a description: its own, or the adapted one.
    pub fn new(base: A, description: Description) -> Self {
        Self { base, description }
    }
}

impl<A: Architecture> From<A> for Adapted<A> {
    /// Wraps the model without adapters.
    fn from(base: A) -> Self {
        let description = base.description().clone();
        Self { base, description }
    }
}

impl<A: Architecture> Architecture for Adapted<A> {
    fn description(&self) -> &Description {
        &self.description
    }

    fn head(&self) -> Head {
        self.base.head()
    }

    fn positions_max(&self) -> Option<usize> {
        self.base.positions_max()
    }

    fn first(&self, b: &mut Builder<'_>) -> Result<Tensor, Error> {
        self.base.first(b)
    }

    fn middle(&self, block: BlockId, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        self.base.middle(block, b, x)
    }

    fn last(&self, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        self.base.last(b, x)
    }
}
