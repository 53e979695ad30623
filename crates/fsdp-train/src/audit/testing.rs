//! Models for the tests of audits.

use fsdp_core::model::{ModelSpec, ParamSpec};
use fsdp_core::scalars::Tallies;

/// A model that has nothing but trained parameters of these names and shapes.
pub(super) fn spec(params: &[(&str, &[usize])]) -> ModelSpec {
    let param = |(name, shape): &(&str, &[usize])| ParamSpec {
        fqn: (*name).to_owned(),
        aliases: Vec::new(),
        shape: shape.to_vec(),
        trainable: true,
        expert: None,
        quantized: None,
        keep_f32: false,
    };
    let params = params.iter().map(param).collect();
    ModelSpec { params, modules: Vec::new(), blocks: Vec::new(), tallies: Tallies::default() }
}
