//! Distributed checkpoints of Megatron Core (`torch_dist`).
//!
//! ```text
//! .metadata, __0_0.distcp, ..   tensors, as PyTorch's distributed checkpoints (DCP) have them
//! common.pt                     a file of torch.save: arguments, iteration, settings of the optimizer
//! metadata.json                 the kind of the checkpoint, written last
//! ```
//!
//! Layers are stacked on a leading axis (`decoder.layers.mlp.linear_fc2.weight` of shape `[layers, ..]`), and so are experts
//! after it; if layers differ, each has tensors of its own (`decoder.layers.0.`). The states of an optimizer are named
//! `optimizer.state.<state>.<parameter>`, which becomes `optimizer.state.<parameter>.<state>` here, as in all other
//! formats. `optimizer.distributed.` holds buffers of the distributed optimizer (`dp_reshardable`), whose parameters only
//! the running model knows.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use super::{dcp, torch_file};
use crate::{
    checkpoint::{Checkpoint, EXTRA_STATE, Key, Role, Tensor, Value, join},
    error::Error,
    file_io::Files,
};

/// The file of everything that is not sharded.
pub(super) const COMMON_FILE: &str = "common.pt";

/// The file that states the kind of the checkpoint.
pub(super) const KIND_FILE: &str = "metadata.json";

/// Maximum length of [`KIND_FILE`]; Megatron writes about 120 bytes.
const KIND_BYTES_MAX: u64 = 1 << 16;

/// The kind that this module reads.
const KIND: &str = "torch_dist";

/// Whether a directory of DCP files was written by Megatron.
pub(super) fn is_at(dir: &Path, names: &[String]) -> bool {
    names.iter().any(|name| name == COMMON_FILE) || kind(dir).is_some()
}

/// The kind that [`KIND_FILE`] states; `None` if there is no such file, or it is of another program.
fn kind(dir: &Path) -> Option<String> {
    let path = dir.join(KIND_FILE);
    let text = Files::anywhere().exists(&path).then(|| Files::anywhere().read_small(&path, KIND_BYTES_MAX));
    let json: serde_json::Value = serde_json::from_slice(&text?.ok()??).ok()?;
    Some(json.get("sharded_backend")?.as_str()?.to_owned())
}

/// Reads a checkpoint directory (`iter_0000010`).
///
/// # Errors
/// Those of [`dcp::open`] and [`torch_file::open`]; [`Error::Malformed`] if the save did not end, or a file is missing;
/// [`Error::Unsupported`] for another kind.
pub fn open(dir: &Path) -> Result<Checkpoint, Error> {
    match kind(dir).as_deref() {
        Some(KIND) => {}
        Some(other) => {
            let reason =
                format!("it is a checkpoint of Megatron of the kind `{other}`, and only `{KIND}` is read");
            return Err(Error::unsupported(dir, reason));
        }
        None => {
            let reason = format!(
                "its {KIND_FILE} is missing or damaged, which Megatron writes last: the save did not end, or the file has \
                 to be fetched again"
            );
            return Err(Error::malformed(dir, reason));
        }
    }
    let common = dir.join(COMMON_FILE);
    if !Files::anywhere().exists(&common) {
        let reason =
            format!("its {COMMON_FILE} is missing, with the settings of the optimizer; fetch it again");
        return Err(Error::malformed(dir, reason));
    }
    let mut checkpoint = dcp::open(dir)?;
    // Ranks that hold only copies have no files.
    checkpoint.world_size = None;
    let alike = alike_files(&checkpoint);
    checkpoint.limits.extend(alike);
    // Megatron's names are flat on purpose.
    checkpoint.notes.retain(|note| !note.contains(dcp::FLAT_NAMES));
    for (name, tensor) in std::mem::take(&mut checkpoint.tensors) {
        let tensor = placed(&name, tensor);
        if let Some(first) = checkpoint.tensors.insert(join(&tensor.path), tensor) {
            let reason = format!("it holds `{}` twice", join(&first.path));
            return Err(Error::malformed(dir, reason));
        }
    }
    for (name, object) in &mut checkpoint.values {
        object.role = if is_of_optimizer(name) { Role::Optimizer } else { Role::Other };
    }
    let mut common = torch_file::open(&common)?;
    common.tensors.values_mut().for_each(|tensor| tensor.role = role_in_common(&tensor.path));
    common.values.values_mut().for_each(|object| object.role = role_in_common(&object.path));
    let text = |name: &str| match common.values.get(name).map(|object| &object.value) {
        Some(Value::Int(number)) => Some(number.to_string()),
        Some(Value::Str(text)) => Some(text.clone()),
        _ => None,
    };
    checkpoint.run_state.extend(text("iteration").map(|iteration| ("step".to_owned(), iteration)));
    let sharding = text("content_metadata.distrib_optim_sharding_type");
    let sharding = sharding.map_or(String::new(), |kind| format!(" ({kind})"));
    checkpoint.format = format!("Megatron Core {KIND}{sharding}: {}", checkpoint.format);
    checkpoint.join(common, &[], None)?;
    Ok(checkpoint)
}

/// The limit of files that have tensors of the same sizes in the same places, as those of ranks with other experts do.
fn alike_files(checkpoint: &Checkpoint) -> Option<String> {
    let mut places: BTreeMap<usize, BTreeSet<(u64, u64)>> = BTreeMap::new();
    for tensor in checkpoint.tensors.values() {
        for chunk in &tensor.chunks {
            let len = chunk.region.len()?.saturating_mul(tensor.dtype.size_bytes() as u64);
            places.entry(chunk.source).or_default().insert((chunk.offset, len));
        }
    }
    let mut seen = BTreeMap::new();
    let (first, second) =
        places.iter().find_map(|(source, of_file)| Some((seen.insert(of_file, *source)?, *source)))?;
    let name = |source: usize| checkpoint.sources[source].path().file_name().unwrap_or_default().display();
    Some(format!(
        "files of the same sizes that were exchanged, as {} and {}: tensors in them do not say their names",
        name(first),
        name(second)
    ))
}

/// A tensor under its name in other formats, with its role.
fn placed(name: &str, tensor: Tensor) -> Tensor {
    if !is_of_optimizer(name) {
        // What modules store beside parameters is no weight: scales of FP8, for example.
        let is_other = name.starts_with("rng_state") || name.contains(EXTRA_STATE);
        let role = if is_other { Role::Other } else { Role::Model };
        return Tensor { role, ..tensor };
    }
    let path = match state_of(name) {
        Some((state, parameter)) => {
            ["optimizer", "state", parameter, state].map(|step| Key::Name(step.to_owned())).to_vec()
        }
        None => tensor.path,
    };
    Tensor { path, role: Role::Optimizer, ..tensor }
}

/// Whether a sharded tensor or object belongs to an optimizer, of which there may be several in a chain.
fn is_of_optimizer(name: &str) -> bool {
    let name = match name.strip_prefix("chained_").and_then(|rest| rest.split_once('.')) {
        Some((number, rest)) if number.parse::<u32>().is_ok() => rest,
        _ => name,
    };
    name.starts_with("optimizer.")
}

/// The state and the parameter in `optimizer.state.<state>.<parameter>`. Chained optimizers have different parameters.
fn state_of(name: &str) -> Option<(&str, &str)> {
    name.split_once("optimizer.state.")?.1.split_once('.')
}

fn role_in_common(path: &[Key]) -> Role {
    match path.first() {
        Some(Key::Name(first)) if first == "optimizer" => Role::Optimizer,
        _ => Role::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::safetensors::TensorType;

    #[test]
    fn states_of_chained_optimizers_have_the_names_of_their_parameters() {
        let found = state_of("chained_1.optimizer.state.exp_avg.decoder.final_layernorm.weight");
        assert_eq!(found, Some(("exp_avg", "decoder.final_layernorm.weight")));
        assert!(is_of_optimizer("chained_0.optimizer.distributed.dp_group_idx_0.bucket_idx_0.param"));
        assert!(!is_of_optimizer("chained_head.optimizer.weight") && !is_of_optimizer("decoder.optimizer.w"));
        assert_eq!(state_of("optimizer.distributed.dp_group_idx_0.bucket_idx_0.param"), None);
    }

    #[test]
    fn extra_states_and_random_states_are_no_weights() {
        let role = |name: &str| {
            let (path, dtype) = (vec![Key::Name(name.to_owned())], TensorType::U8);
            let tensor = Tensor { path, role: Role::Model, dtype, shape: vec![0], chunks: Vec::new() };
            placed(name, tensor).role
        };
        assert_eq!(role("decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2.0"), Role::Other);
        assert_eq!(role("rng_state/shard_0.0_1.1.0.0.torch_rng_state"), Role::Other);
        assert_eq!(role("decoder.layers.self_attention.linear_qkv.weight"), Role::Model);
        assert_eq!(role("chained_0.optimizer.distributed.dp_group_idx_0.param"), Role::Optimizer);
    }
}
