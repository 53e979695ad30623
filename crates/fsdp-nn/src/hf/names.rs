//! What the tensors of a Hugging Face checkpoint are to a model.
//!
//! Checkpoints hold more than parameters: tied weights twice, causal masks and rotary tables of older
//! versions. And the published GPT-2 files name everything without the leading `transformer.`.

use fsdp_core::model::{ModelSpec, ParamId};

use super::model::HfModel;
use crate::model::Architecture;

/// What a tensor of a checkpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorRole {
    /// A parameter, under its first name.
    Param(ParamId),
    /// A tied parameter under another of its names: to be ignored, or checked to be the same.
    Alias(ParamId),
    /// A constant that older versions saved: to be ignored.
    Constant,
    /// Nothing that the model knows.
    Unknown,
}

impl HfModel {
    /// What the tensor called `name` in a checkpoint is to this model.
    pub fn tensor_role(&self, name: &str) -> TensorRole {
        let spec = &self.description().spec;
        match self {
            HfModel::Llama(_) if name.ends_with(".rotary_emb.inv_freq") => TensorRole::Constant,
            HfModel::Llama(_) => role(spec, name),
            HfModel::Gpt2(_) if name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") => {
                TensorRole::Constant
            }
            HfModel::Gpt2(_) => match role(spec, name) {
                TensorRole::Unknown => role(spec, &format!("transformer.{name}")),
                known => known,
            },
        }
    }
}

fn role(spec: &ModelSpec, name: &str) -> TensorRole {
    for (index, param) in spec.params.iter().enumerate() {
        if param.fqn == name {
            return TensorRole::Param(ParamId(index));
        }
        if param.aliases.iter().any(|alias| alias == name) {
            return TensorRole::Alias(ParamId(index));
        }
    }
    TensorRole::Unknown
}
