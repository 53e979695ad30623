//! The configuration of a Hugging Face model: copied next to the weights, and used to find out whether weights are
//! tied.

use std::path::Path;

use crate::{
    checkpoint::{Checkpoint, ExpertNames, Key, ModelSizes, Role, join},
    diff::{self, Outcome},
    error::Error,
    file_io::{Files, directory_of},
    targets::{OutputTensor, Selection},
    transfer::{Options, PlannedFile},
};

/// Name of the configuration file.
const CONFIG_FILE: &str = "config.json";

/// Maximum size of a configuration, in bytes.
const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// The last steps of the names of output weights.
const HEAD: &str = "lm_head.weight";

/// The last steps of the names of input weights.
const EMBEDDINGS: [&str; 4] =
    ["embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight"];

/// A parsed configuration.
pub(super) struct Config {
    text: Vec<u8>,
    /// Whether it declares that output and input weights are one tensor.
    pub(super) ties_embeddings: bool,
}

impl Config {
    /// Converts it to the file to write.
    pub(super) fn into_file(self) -> PlannedFile {
        let len = self.text.len() as u64;
        PlannedFile { name: CONFIG_FILE.to_owned(), len, literals: vec![(0, self.text)], places: Vec::new() }
    }
}

/// Reads a configuration.
pub(super) fn read(path: &Path) -> Result<Config, Error> {
    let (text, json) = parsed(path)?;
    let ties = |part: &serde_json::Value| part["tie_word_embeddings"].as_bool();
    let ties_embeddings = ties(&json).or_else(|| ties(&json["text_config"])).unwrap_or(false);
    Ok(Config { text, ties_embeddings })
}

/// The names of single experts in the family of models that a configuration belongs to.
///
/// # Errors
/// [`Error::BadRequest`] if experts of this family are not known to be stacked; [`Error::Malformed`], [`Error::Io`].
pub fn expert_names(path: &Path) -> Result<ExpertNames, Error> {
    let (_, json) = parsed(path)?;
    let model_type = json["model_type"].as_str().unwrap_or_default();
    ExpertNames::of_model_type(model_type).ok_or_else(|| {
        let reason = format!(
            "its model_type is `{model_type}`, whose experts are not known to be stacked; known are {}",
            ExpertNames::model_types().collect::<Vec<_>>().join(", ")
        );
        Error::bad_request(path, reason)
    })
}

/// The models whose tensors in Megatron Core are known: decoders of layers that are alike.
const OF_MEGATRON: [&str; 6] = ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"];

/// The sizes of a model, by which Megatron's tensors become those of Hugging Face.
pub(super) fn model_sizes(path: &Path) -> Result<ModelSizes, Error> {
    let (_, json) = parsed(path)?;
    let refused = |reason: String| Error::bad_request(path, reason);
    let model_type = json["model_type"].as_str().unwrap_or_default();
    if !OF_MEGATRON.contains(&model_type) {
        return Err(refused(format!(
            "its model_type is `{model_type}`, whose tensors in Megatron Core are not known; known are {}",
            OF_MEGATRON.join(", ")
        )));
    }
    let optional = |key: &str| json[key].as_u64().filter(|number| *number > 0);
    let number =
        |key: &str| optional(key).ok_or_else(|| refused(format!("its `{key}` is not a positive number")));
    let heads = number("num_attention_heads")?;
    let head = match optional("head_dim") {
        Some(head) => head,
        None => number("hidden_size")? / heads,
    };
    let names = ExpertNames::of_model_type(model_type);
    let experts = match names {
        // Versions of transformers write the one or the other.
        Some(_) => Some(optional("num_experts").map_or_else(|| number("num_local_experts"), Ok)?),
        None => None,
    };
    Ok(ModelSizes {
        vocabulary: number("vocab_size")?,
        layers: number("num_hidden_layers")?,
        heads,
        key_heads: optional("num_key_value_heads").unwrap_or(heads),
        head,
        experts: experts.zip(names),
    })
}

/// Like [`expert_names`], of the configuration in a directory or beside a file; `None` if there is none.
///
/// # Errors
/// Those of [`expert_names`].
pub fn expert_names_beside(weights: &Path) -> Result<Option<ExpertNames>, Error> {
    let files = Files::anywhere();
    let dir = if files.is_directory(weights) { weights.to_owned() } else { directory_of(weights) };
    let config = dir.join(CONFIG_FILE);
    files.exists(&config).then(|| expert_names(&config)).transpose()
}

fn parsed(path: &Path) -> Result<(Vec<u8>, serde_json::Value), Error> {
    let bad = |detail: String| Error::malformed(path, format!("it is not a model configuration: {detail}"));
    let text = Files::anywhere().read_small(path, CONFIG_BYTES_MAX)?;
    let text = text.ok_or_else(|| bad(format!("it has more than {CONFIG_BYTES_MAX} bytes")))?;
    let json: serde_json::Value = serde_json::from_slice(&text).map_err(|error| bad(error.to_string()))?;
    if !json.is_object() {
        return Err(bad("it is not a JSON object".to_owned()));
    }
    Ok((text, json))
}

/// Adds output weights that share the input weights, unless the selection already has output weights.
pub(super) fn add_head(checkpoint: &Checkpoint, selection: &mut Selection) -> Result<(), Error> {
    let tensors = &selection.tensors;
    let is_one = |tensor: &OutputTensor, ends: &[&str]| {
        tensor.role == Role::Model && ends.iter().any(|end| ends_in(&tensor.name, end))
    };
    if tensors.iter().any(|tensor| is_one(tensor, &[HEAD])) {
        return Ok(());
    }
    let Some(first) = tensors.iter().position(|tensor| is_one(tensor, &EMBEDDINGS)) else {
        let reason = format!("it has no embeddings that `{HEAD}` could be tied to; omit --tied");
        return Err(Error::bad_request(&checkpoint.path, reason));
    };
    let mut head = tensors[first].clone();
    // A leading key of the whole model is kept.
    let outer = head.path.len() - 1;
    head.path.truncate(outer);
    head.path.push(Key::Name(HEAD.to_owned()));
    head.name = join(&head.path);
    head.tied_to = Some(first);
    selection.tensors.push(head);
    Ok(())
}

fn ends_in(name: &str, end: &str) -> bool {
    name.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Ties output weights to input weights if both exist, after proving that they are equal.
pub(super) fn tie_head(
    checkpoint: &Checkpoint,
    selection: &mut Selection,
    options: &Options,
) -> Result<(), Error> {
    let tensors = &mut selection.tensors;
    let head = tensors.iter().position(|tensor| ends_in(&tensor.name, HEAD));
    let is_embedding = |name: &str| EMBEDDINGS.iter().any(|end| ends_in(name, end));
    let embedding = tensors.iter().position(|tensor| is_embedding(&tensor.name));
    let (Some(head), Some(embedding)) = (head, embedding) else { return Ok(()) };
    let first_of = |index: usize| tensors[index].tied_to.unwrap_or(index);
    let (head, embedding) = (first_of(head), first_of(embedding));
    if head == embedding {
        return Ok(());
    }
    let (a, b) = (&tensors[head], &tensors[embedding]);
    let outcome = diff::within(checkpoint, [&a.source, &b.source], options)?;
    if outcome != Outcome::EqualBits {
        let reason = format!(
            "the configuration ties `{}` to `{}`, but their elements differ; correct tie_word_embeddings",
            a.name, b.name
        );
        return Err(Error::bad_request(&checkpoint.path, reason));
    }
    let (first, second) = (head.min(embedding), head.max(embedding));
    for (index, tensor) in tensors.iter_mut().enumerate() {
        if index == second || tensor.tied_to == Some(second) {
            tensor.tied_to = Some(first);
        }
    }
    Ok(())
}
