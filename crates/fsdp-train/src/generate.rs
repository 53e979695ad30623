//! Text generation with a model in Hugging Face format, in host memory.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use fsdp_ckpt::training::ModelWeights;
use fsdp_config::input_file::{self, CONFIG_BYTES_MAX};
use fsdp_core::DType;
use fsdp_core::memory::Category;
use fsdp_core::model::ParamId;
use fsdp_core::update::Piece;
use fsdp_data::Tokenizer;
use fsdp_nn::HostMemory;
use fsdp_nn::model::unsharded::Whole;
use fsdp_nn::model::{Architecture, Session};
use fsdp_nn::sampling::{Sampling, likeliest};
use serde_json::Value;

use crate::error::TrainError;
use crate::init::InitSource;

/// Elements of a tensor to read at a time.
const PART_ELEMS: usize = 1 << 20;

/// The files of a model directory that name end-of-text tokens, in the order in which transformers consults them.
const CONFIGS: [&str; 2] = ["generation_config.json", "config.json"];

/// Reads all weights of a model directory.
///
/// # Errors
/// [`TrainError::Checkpoint`], with a list of everything that is missing, unexpected or of another shape.
pub fn load(
    memory: &HostMemory,
    dir: &Path,
    architecture: &impl Architecture,
    dtype: DType,
) -> Result<Whole<fsdp_nn::HostBuffer>, TrainError> {
    let spec = &architecture.description().spec;
    let weights = InitSource::Pretrained(Arc::new(ModelWeights::open(dir)?));
    weights.check(spec)?;
    let mut model = Whole::new(memory, spec, Category::ParameterShard, dtype)?;
    for (id, param) in spec.params.iter().enumerate() {
        let row_len = param.row_len().unwrap_or(1);
        let part = (PART_ELEMS / row_len).max(1) * row_len;
        for first in (0..param.len()).step_by(part) {
            let len = part.min(param.len() - first);
            let piece = Piece { param: ParamId(id), offset: 0, len, param_offset: first, row_len };
            let mut values = vec![0.0; len];
            weights.fill(spec, &piece, &mut values)?;
            model.write_part(memory, ParamId(id), first, &values)?;
        }
    }
    Ok(model)
}

/// Returns the tokens that end a text, from the first source that names any: `generation_config.json`, `config.json`,
/// the tokenizer.
///
/// # Errors
/// [`TrainError::Io`] for a file that exists and cannot be read.
pub fn ends(dir: &Path, tokenizer: Option<&Tokenizer>) -> Result<BTreeSet<u32>, TrainError> {
    for name in CONFIGS {
        let file = dir.join(name);
        if !file.exists() {
            continue;
        }
        let text = input_file::read_text(&file, CONFIG_BYTES_MAX).map_err(TrainError::io("read", &file))?;
        let fields: Value = serde_json::from_str(&text).unwrap_or_default();
        let found = match &fields["eos_token_id"] {
            Value::Array(ids) => ids.iter().filter_map(id).collect(),
            value => id(value).into_iter().collect::<BTreeSet<u32>>(),
        };
        if !found.is_empty() {
            return Ok(found);
        }
    }
    Ok(tokenizer.and_then(Tokenizer::eos).into_iter().collect())
}

fn id(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

/// How a text is continued.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// Maximum number of tokens to generate.
    pub max_new_tokens: usize,
    /// How tokens are drawn; `None` always takes the likeliest one.
    pub sampling: Option<Sampling>,
    /// Tokens that end the text.
    pub ends: BTreeSet<u32>,
}

/// Continues a text and returns the new tokens, including one that ends the text. `on_token` receives each token as soon
/// as it is known.
///
/// # Errors
/// Errors of the session.
///
/// # Panics
/// If the prompt is empty, or the session has no room for the prompt and the new tokens.
pub fn generate_tokens<A: Architecture>(
    session: &mut Session<A>,
    prompt: &[u32],
    options: &GenerateOptions,
    mut on_token: impl FnMut(u32),
) -> Result<Vec<u32>, TrainError> {
    let mut tokens: Vec<u32> = Vec::new();
    let mut logits = session.extend(prompt)?;
    while tokens.len() < options.max_new_tokens {
        let position = tokens.len() as u64;
        let token =
            options.sampling.map_or_else(|| likeliest(&logits), |sampling| sampling.draw(&logits, position));
        tokens.push(token);
        on_token(token);
        if options.ends.contains(&token) || tokens.len() == options.max_new_tokens {
            break;
        }
        logits = session.extend(&[token])?;
    }
    Ok(tokens)
}
