//! A model of any family that a `config.json` can name.

use fsdp_core::Error;
use fsdp_core::model::BlockId;

use crate::graph::{Builder, Tensor};
use crate::layer::{Description, Head};
use crate::model::{Architecture, Gpt2, Llama};

/// A model built from a `config.json`.
#[derive(Clone, Debug)]
pub enum HfModel {
    /// A Llama.
    Llama(Llama),
    /// A GPT-2.
    Gpt2(Gpt2),
}

impl Architecture for HfModel {
    fn description(&self) -> &Description {
        match self {
            HfModel::Llama(model) => model.description(),
            HfModel::Gpt2(model) => model.description(),
        }
    }

    fn head(&self) -> Head {
        match self {
            HfModel::Llama(model) => model.head(),
            HfModel::Gpt2(model) => model.head(),
        }
    }

    fn positions_max(&self) -> Option<usize> {
        match self {
            HfModel::Llama(model) => model.positions_max(),
            HfModel::Gpt2(model) => model.positions_max(),
        }
    }

    fn first(&self, b: &mut Builder<'_>) -> Result<Tensor, Error> {
        match self {
            HfModel::Llama(model) => model.first(b),
            HfModel::Gpt2(model) => model.first(b),
        }
    }

    fn middle(&self, block: BlockId, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        match self {
            HfModel::Llama(model) => model.middle(block, b, x),
            HfModel::Gpt2(model) => model.middle(block, b, x),
        }
    }

    fn last(&self, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        match self {
            HfModel::Llama(model) => model.last(b, x),
            HfModel::Gpt2(model) => model.last(b, x),
        }
    }
}
