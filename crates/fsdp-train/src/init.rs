//! Initial parameters: drawn from a seed, or read from a checkpoint. Either way a rank asks only for its own rows;
//! files are read by the first replica and broadcast to the others.

mod adapted;
mod lengths;
mod quantized;

use std::path::Path;
use std::sync::Arc;

use fsdp_ckpt::safetensors::TensorType;
use fsdp_ckpt::training::ModelWeights;
use fsdp_core::engine::Origin;
use fsdp_core::model::{ModelSpec, ParamSpec};
use fsdp_core::update::Piece;
use fsdp_nn::{Init, hf};

use adapted::{AdaptedInit, TakenBase};
pub(crate) use lengths::row_lengths;
pub(crate) use quantized::{QuantizedWeight, ReadRows};

use crate::error::TrainError;

/// Elements of two tensors to compare at a time.
const COMPARED_ELEMS: usize = 1 << 16;

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
    /// Read from the files of a model.
    Pretrained(Arc<ModelWeights>),
    /// A base, and adapters beside it.
    Adapted(Arc<AdaptedInit>),
}

impl InitSource {
    /// Whether all ranks compute the values, or the first replica reads them.
    pub fn origin(&self) -> Origin {
        match self {
            InitSource::Random { .. } => Origin::Computed,
            InitSource::Pretrained(_) => Origin::Read,
            InitSource::Adapted(adapted) => adapted.origin(),
        }
    }

    /// The dtype of the files; `None` if nothing is read from files or their tensors have different dtypes.
    pub(crate) fn dtype(&self) -> Option<TensorType> {
        let mut types = self.pretrained()?.dtypes().into_iter();
        let first = types.next()?;
        types.all(|dtype| dtype == first).then_some(first)
    }

    /// The files of the model or of the adapters' base; `None` if nothing is read from files.
    pub(crate) fn pretrained(&self) -> Option<&ModelWeights> {
        match self {
            InitSource::Random { .. } => None,
            InitSource::Pretrained(reader) => Some(reader),
            InitSource::Adapted(adapted) => adapted.base().pretrained(),
        }
    }

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
            InitSource::Adapted(adapted) => adapted.fill(spec, piece, values)?,
        }
        Ok(())
    }

    /// Checks that a checkpoint has exactly the model's parameters, in their shapes and as floats. Copies of a tied
    /// parameter must be equal, and checksums, if the files have them, must match.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`], with a list of everything that is missing, extra, of another shape or of another
    /// type; [`TrainError::Input`] if only the head is missing, or copies differ.
    pub fn check(&self, spec: &ModelSpec) -> Result<(), TrainError> {
        let reader = match self {
            InitSource::Random { .. } => return Ok(()),
            InitSource::Pretrained(reader) => reader,
            InitSource::Adapted(adapted) => return adapted.check(spec),
        };
        check_pretrained(reader, &spec.params)
    }

    /// The digest of a base that is read from files, and that the checkpoints of a run do not hold; `None` without one.
    pub(crate) fn base_digest(&self) -> Option<&str> {
        let InitSource::Adapted(adapted) = self else { return None };
        adapted.base_digest()
    }

    /// The checkpoint of another trainer from which a base is read; `None` without one.
    pub(crate) fn taken_base(&self) -> Option<&TakenBase> {
        let InitSource::Adapted(adapted) = self else { return None };
        adapted.taken_base()
    }
}

/// Checks that a checkpoint has exactly these parameters.
pub(crate) fn check_pretrained(reader: &ModelWeights, params: &[ParamSpec]) -> Result<(), TrainError> {
    let is_stored = |param| names(param).any(|name| reader.has(name));
    let missing: Vec<&ParamSpec> = params.iter().filter(|param| !is_stored(param)).collect();
    if let [head] = missing[..]
        && hf::base_name(&head.fqn).is_none()
    {
        return Err(no_head(reader.path(), &head.fqn));
    }
    let copies = |param| {
        let first = stored_name(reader, param);
        let others = names(param).filter(move |&name| name != first && reader.has(name));
        std::iter::once(first).chain(others)
    };
    let expected =
        params.iter().flat_map(|param| copies(param).map(move |name| (name, param.shape.as_slice())));
    let is_unused = |name: &str| hf::is_constant(name) || predicts_further_tokens(reader, name);
    reader.check_tensors(expected, is_unused, TensorType::is_convertible)?;
    reader.check_sums()?;
    for param in params {
        for copy in copies(param).skip(1) {
            check_equal(reader, param, [stored_name(reader, param), copy])?;
        }
    }
    Ok(())
}

/// Whether a tensor belongs to one of the layers after the last that predict more than the next token (DeepSeek V3, GLM 4.5), which
/// transformers leaves out, too. Only they project an embedding and a hidden state together; or they have a module of their
/// own (Qwen 3 Next).
fn predicts_further_tokens(reader: &ModelWeights, name: &str) -> bool {
    if name.starts_with("mtp.") {
        return true;
    }
    let layer = name.find("layers.").and_then(|start| {
        let number = &name[start + "layers.".len()..];
        Some(&name[..start + "layers.".len() + number.find('.')?])
    });
    layer.is_some_and(|layer| reader.has(&format!("{layer}.eh_proj.weight")))
}

/// Checks that two tensors are bitwise equal, a block of rows at a time.
fn check_equal(reader: &ModelWeights, param: &ParamSpec, names: [&str; 2]) -> Result<(), TrainError> {
    let rows = param.shape.first().copied().unwrap_or(1);
    let row_len: usize = param.shape.iter().skip(1).product();
    let block = (COMPARED_ELEMS / row_len.max(1)).max(1);
    for first in (0..rows).step_by(block) {
        let rows = first..rows.min(first + block);
        let mut values = [(); 2].map(|()| vec![0.0; rows.len() * row_len]);
        for (values, name) in values.iter_mut().zip(names) {
            reader.read_rows_f64(name, rows.clone(), values)?;
        }
        let [left, right] = values.map(|values| values.into_iter().map(f64::to_bits));
        if !left.eq(right) {
            return Err(tied_differ(reader.path(), names));
        }
    }
    Ok(())
}

/// The error for files of a model without its output head, which the model does not share with the embedding.
fn no_head(path: &Path, head: &str) -> TrainError {
    TrainError::Input(format!(
        "{}: has no output head (`{head}`), so it would be random: a class without a head, such as LlamaModel, wrote these \
         files; save the model with its head (AutoModelForCausalLM), or set `tie_word_embeddings` in config.json to true if \
         the embedding is the head",
        path.display()
    ))
}

/// The error for two different tensors of a parameter that the model ties, of which the first would be used.
pub(crate) fn tied_differ(path: &Path, [first, second]: [&str; 2]) -> TrainError {
    TrainError::Input(format!(
        "{}: `{first}` and `{second}` differ, but the model ties them (tie_word_embeddings in config.json); remove \
         one of the two, or set tie_word_embeddings to false",
        path.display()
    ))
}

/// The name under which a checkpoint holds a parameter: its own or an alias.
pub(crate) fn stored_name<'a>(reader: &ModelWeights, param: &'a ParamSpec) -> &'a str {
    names(param).find(|name| reader.has(name)).unwrap_or(&param.fqn)
}

/// The names that a parameter may have in a checkpoint.
pub fn names(param: &ParamSpec) -> impl Iterator<Item = &str> {
    let full = std::iter::once(&param.fqn).chain(&param.aliases).map(String::as_str);
    full.flat_map(|name| [Some(name), hf::base_name(name), hf::name_in_memory(name)]).flatten()
}
