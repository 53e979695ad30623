//! Where initial parameters come from: a seed, or a checkpoint. Either way a rank asks for its own rows only.

use std::sync::Arc;

use fsdp_ckpt::model_files::ModelReader;
use fsdp_core::model::{ModelSpec, ParamSpec};
use fsdp_core::update::Piece;
use fsdp_nn::Init;

use crate::error::TrainError;

/// The source of initial parameters.
#[derive(Clone, Debug)]
pub enum InitSource {
    /// Drawn from counter-based generators keyed by (seed, FQN, element).
    Random {
        /// The seed.
        seed: u64,
        /// The distribution of each parameter.
        init: Arc<Vec<Init>>,
    },
    /// Read from safetensors files.
    Pretrained(Arc<ModelReader>),
}

impl InitSource {
    /// Writes the initial values of a piece.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`].
    pub fn fill(&self, spec: &ModelSpec, piece: &Piece, values: &mut [f64]) -> Result<(), TrainError> {
        let param = spec.param(piece.param);
        match self {
            InitSource::Random { seed, init } => {
                init[piece.param.0].fill_f64(*seed, &param.fqn, piece.param_offset, values);
            }
            InitSource::Pretrained(reader) => {
                let name = stored_name(reader, param);
                let first = piece.param_offset / piece.row_len;
                reader.read_rows_f64(name, first..first + piece.len / piece.row_len, values)?;
            }
        }
        Ok(())
    }

    /// Checks that a checkpoint has every parameter in its shape, and nothing else.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`] that lists everything missing, extra and of another shape.
    pub fn check(&self, spec: &ModelSpec) -> Result<(), TrainError> {
        let InitSource::Pretrained(reader) = self else { return Ok(()) };
        let expected = spec.params.iter().map(|param| (stored_name(reader, param), param.shape.as_slice()));
        let known = |name: &str| is_constant(name) || names_of_all(spec).any(|known| known == name);
        Ok(reader.check_names_except(expected, known)?)
    }
}

/// The name under which a checkpoint holds a parameter: its own, or that of a tied use.
fn stored_name<'a>(reader: &ModelReader, param: &'a ParamSpec) -> &'a str {
    names(param).find(|name| reader.entry(name).is_ok()).unwrap_or(&param.fqn)
}

/// The names that a parameter may have in a checkpoint. Published GPT-2 files leave `transformer.` out.
fn names(param: &ParamSpec) -> impl Iterator<Item = &str> {
    let full = std::iter::once(&param.fqn).chain(&param.aliases).map(String::as_str);
    full.flat_map(|name| [Some(name), name.strip_prefix("transformer.")]).flatten()
}

fn names_of_all(spec: &ModelSpec) -> impl Iterator<Item = &str> {
    spec.params.iter().flat_map(names)
}

/// Whether a tensor is a causal mask or a rotary table that older versions of transformers saved.
fn is_constant(name: &str) -> bool {
    [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"].iter().any(|end| name.ends_with(end))
}
