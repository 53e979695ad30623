//! A model of any family that a `config.json` can name.

use fsdp_core::Error;
use fsdp_core::model::BlockId;

use crate::backend::Backend;
use crate::layer::{Description, Head};
use crate::model::{Architecture, Gpt2, Llama};
use crate::tape::{Tape, Tensor};

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

    fn first<M: Backend>(&self, tape: &mut Tape<'_, M>) -> Result<Tensor<M>, Error> {
        match self {
            HfModel::Llama(model) => model.first(tape),
            HfModel::Gpt2(model) => model.first(tape),
        }
    }

    fn middle<M: Backend>(
        &self,
        block: BlockId,
        tape: &mut Tape<'_, M>,
        x: Tensor<M>,
    ) -> Result<Tensor<M>, Error> {
        match self {
            HfModel::Llama(model) => model.middle(block, tape, x),
            HfModel::Gpt2(model) => model.middle(block, tape, x),
        }
    }

    fn last<M: Backend>(&self, tape: &mut Tape<'_, M>, x: Tensor<M>) -> Result<Tensor<M>, Error> {
        match self {
            HfModel::Llama(model) => model.last(tape, x),
            HfModel::Gpt2(model) => model.last(tape, x),
        }
    }
}
