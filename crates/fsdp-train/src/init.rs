//! Where initial parameters come from: a seed, or a checkpoint. Either way a rank asks for its own rows only.

use std::sync::Arc;

use fsdp_ckpt::model_files::ModelReader;
use fsdp_core::model::ModelSpec;
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
        let alias = |name: &str| {
            let is_buffer = name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
            is_buffer
                || spec
                    .params
                    .iter()
                    .any(|param| param.fqn == name || param.aliases.iter().any(|a| a == name))
        };
        Ok(reader.check_names_except(expected, alias)?)
    }
}

/// The name under which a checkpoint holds a parameter: its own, or that of a tied use.
fn stored_name<'a>(reader: &ModelReader, param: &'a fsdp_core::model::ParamSpec) -> &'a str {
    let names = std::iter::once(&param.fqn).chain(&param.aliases);
    names.into_iter().find(|name| reader.entry(name).is_ok()).unwrap_or(&param.fqn)
}
