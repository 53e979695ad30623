//! The older checkpoints of Megatron-LM (`--ckpt-format torch`): a folder for each rank of the model.
//!
//! ```text
//! mp_rank_00_000/model_optim_rng.pt     tensor rank 0, stage 0; where there are stages, the second number is theirs,
//! mp_rank_00_001/model_optim_rng.pt     and where experts are distributed, the last one is theirs
//! ```
//!
//! Each file has the part of the model under local names: layers and experts count from 0 in every stage and rank. With
//! virtual stages, `model0`, `model1`, .. are its chunks, and the layers of all first chunks come before those of all second
//! ones. Which dimension tensor parallelism cuts follows from the name. Weights are read; the states of optimizers are not,
//! whose numbers follow an order that only the running model has.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use super::{
    fields::{count, field, text},
    local::LocalTensor,
    merge::{Part, Place, RankParts, merge},
    rank_file::RankFile,
};
use crate::{
    checkpoint::{Checkpoint, Key, Role, Value},
    error::{Error, Fault},
    file_io::Files,
    torch::Item,
};

/// The file in each folder.
const FILE: &str = "model_optim_rng.pt";

/// The states of the distributed optimizer in a folder, in buffers whose parameters only the running model knows.
pub(super) const BUFFERS_FILE: &str = "distrib_optim.pt";

/// What the folders of ranks begin with.
const FOLDER: &str = "mp_rank_";

/// Maximum number of ranks, stages or virtual stages: a damaged count must not make work without end.
const RANKS_MAX: u64 = 1 << 16;

/// How tensor parallelism cuts a tensor.
enum Cut {
    /// Every rank has all of it.
    Whole,
    /// Along a dimension.
    Dim(usize),
    /// Along the rows, of the gate and the up projection alike.
    GateAndUp,
}

/// The number of ranks along each axis, and of chunks of the model per rank.
struct Sizes {
    tensor: u64,
    stages: u64,
    experts: u64,
    chunks: u64,
    is_gated: bool,
}

/// Whether a directory has the folders of ranks.
pub(super) fn is_at(dir: &Path, names: &[String]) -> bool {
    names.iter().any(|name| name.starts_with(FOLDER) && Files::anywhere().exists(&dir.join(name).join(FILE)))
}

/// Reads the weights in a directory (`iter_0000010`).
///
/// # Errors
/// [`Error::Malformed`] if the file of a rank is missing, is damaged or does not fit the others; [`Error::Unsupported`] for
/// what tensor parallelism cuts in an unknown way.
pub fn open(dir: &Path) -> Result<Checkpoint, Error> {
    let mut folders: Vec<String> = Files::anywhere().list(dir)?;
    folders.retain(|name| name.starts_with(FOLDER));
    folders.sort();
    let mut checkpoint = Checkpoint {
        path: dir.to_owned(),
        format: "Megatron-LM, a folder for each rank".to_owned(),
        ..Checkpoint::default()
    };
    let mut paths = folders.iter().map(|name| dir.join(name).join(FILE));
    let first = paths.find(|path| Files::anywhere().exists(path)).unwrap_or_default();
    let first = RankFile::open(&first, &mut Checkpoint::default())?;
    let sizes = Sizes::of(&first)?;
    let mut files = BTreeMap::new();
    for tensor in 0..sizes.tensor {
        for stage in 0..sizes.stages {
            for expert in 0..sizes.experts {
                let path = dir.join(sizes.folder(tensor, stage, expert)).join(FILE);
                if !Files::anywhere().exists(&path) {
                    return Err(Error::malformed(
                        path,
                        "it is missing: the files of all ranks are needed; fetch it",
                    ));
                }
                files.insert((tensor, stage, expert), RankFile::open(&path, &mut checkpoint)?);
            }
        }
    }
    if folders.len() != files.len() {
        let reason = format!(
            "it has {} folders of ranks, and {} of one save; files were mixed",
            folders.len(),
            files.len()
        );
        return Err(Error::malformed(dir, reason));
    }
    checkpoint.world_size = Some(files.len());
    let mut layers = 0;
    let mut parts: BTreeMap<(u64, u64, u64), Vec<Part>> = BTreeMap::new();
    for chunk in 0..sizes.chunks {
        for stage in 0..sizes.stages {
            let mut of_stage = 0;
            for (&rank, file) in files.iter().filter(|((_, at, _), _)| *at == stage) {
                of_stage = of_stage.max(sizes.add_chunk(
                    file,
                    chunk,
                    layers,
                    rank,
                    parts.entry(rank).or_default(),
                )?);
            }
            layers += of_stage;
        }
    }
    let ranks: Vec<RankParts> =
        parts.into_iter().map(|(rank, parts)| RankParts { path: files[&rank].path.clone(), parts }).collect();
    merge(&ranks, &mut checkpoint)?;
    let known = ["optimizer", "model", "rng_state"];
    let is_rest = |key: &Value| text(key).is_some_and(|key| !known.contains(&key) && !is_chunk(key));
    let first = &files[&(0, 0, 0)];
    if let Item::Dict(items) = &first.root {
        first.add_others(
            items.iter().filter(|(key, _)| is_rest(key)).cloned().collect(),
            Role::Other,
            &mut checkpoint,
        )?;
    }
    let iteration = first.root.get("iteration").map(Item::to_value).as_ref().and_then(count);
    checkpoint.run_state.extend(iteration.map(|number| ("step".to_owned(), number.to_string())));
    checkpoint.notes.push("the states of its optimizer and of random numbers are not read".to_owned());
    checkpoint.limits.push("files exchanged between ranks whose parts have the same shapes: Megatron does not store the rank in them".to_owned());
    Ok(checkpoint)
}

/// Whether a key is that of a chunk of a model with virtual stages.
fn is_chunk(key: &str) -> bool {
    key.strip_prefix("model").is_some_and(|number| number.parse::<u32>().is_ok())
}

impl Sizes {
    /// The sizes in the arguments of the run.
    fn of(file: &RankFile) -> Result<Sizes, Error> {
        let arguments = file.root.get("args").map(Item::to_value);
        let attributes = match &arguments {
            Some(Value::Object { state: Some(state), .. }) => &**state,
            _ => return Err(file.unexpected("`args`", "the arguments of Megatron-LM")),
        };
        let number = |name: &str| match field(attributes, name) {
            None | Some(Value::None) => Ok(1),
            Some(value) => count(value)
                .filter(|number| (1..RANKS_MAX).contains(number))
                .ok_or_else(|| file.unexpected(format!("`args.{name}`"), "a number of ranks")),
        };
        let Item::Dict(items) = &file.root else { return Err(file.unexpected("its root", "a dict")) };
        let chunks = items.iter().filter(|(key, _)| text(key).is_some_and(is_chunk)).count() as u64;
        Ok(Sizes {
            tensor: number("tensor_model_parallel_size")?,
            stages: number("pipeline_model_parallel_size")?,
            experts: number("expert_model_parallel_size")?,
            chunks: chunks.max(1),
            is_gated: field(attributes, "swiglu") == Some(&Value::Bool(true)),
        })
    }

    fn folder(&self, tensor: u64, stage: u64, expert: u64) -> PathBuf {
        let mut name = format!("{FOLDER}{tensor:02}");
        if self.stages > 1 {
            name += &format!("_{stage:03}");
        }
        if self.experts > 1 {
            name += &format!("_{expert:03}");
        }
        name.into()
    }

    /// Adds the tensors in a chunk of a rank, whose layers come after `layers` others. Returns the number of its layers.
    fn add_chunk(
        &self,
        file: &RankFile,
        chunk: u64,
        layers: u64,
        (tensor, _, expert): (u64, u64, u64),
        parts: &mut Vec<Part>,
    ) -> Result<u64, Error> {
        let key = if file.root.get("model").is_some() { "model".to_owned() } else { format!("model{chunk}") };
        let Some(Item::Dict(items)) = file.root.get(&key) else {
            return Err(file.unexpected(format!("`{key}`"), "a dict of the parameters"));
        };
        let per_rank =
            items.iter().filter_map(|(key, _)| expert_of(text(key)?)).map(|(_, number, _)| number + 1).max();
        let mut found = 0;
        for (name, item) in items {
            let (Some(name), Item::Tensor(stored)) = (text(name), item) else { continue };
            let local = LocalTensor::of(stored, file.source);
            let (number, name) = global_name(name, layers, expert.saturating_mul(per_rank.unwrap_or(0)))
                .ok_or_else(|| {
                    file.unexpected(format!("`{name}`"), "the name of a parameter with numbers in range")
                })?;
            found = found.max(number);
            self.add_part(&name, local, tensor, parts).map_err(|fault| fault.in_file(&file.path))?;
        }
        Ok(found)
    }

    fn add_part(
        &self,
        name: &str,
        local: LocalTensor,
        rank: u64,
        parts: &mut Vec<Part>,
    ) -> Result<(), Fault> {
        let too_large = || Fault::new(format!("`{name}` has more elements than can be counted"));
        let mut add = |local: LocalTensor, dim: usize, index: u64, count: u64| {
            let (mut offsets, mut shape) = (vec![0; local.shape.len()], local.shape.clone());
            if count > 1 {
                offsets[dim] = local.shape[dim].checked_mul(index).ok_or_else(too_large)?;
                shape[dim] = local.shape[dim].checked_mul(count).ok_or_else(too_large)?;
                crate::checkpoint::len_bytes(&shape, local.dtype.size_bytes()).ok_or_else(too_large)?;
            }
            let path = vec![Key::Name(name.to_owned())];
            parts.push(Part {
                path,
                role: Role::Model,
                local,
                place: Place::From { offsets, shape },
                windows: None,
            });
            Ok::<_, Fault>(())
        };
        let dims = local.shape.len();
        match cut_of(name, self.is_gated) {
            _ if self.tensor == 1 => add(local, 0, 0, 1),
            None => Err(Fault::unsupported(format!(
                "`{name}` is one of {} parts, and it is not known which dimension they share; convert it with Megatron",
                self.tensor
            ))),
            Some(Cut::Whole) => add(local, 0, 0, 1),
            Some(Cut::Dim(dim)) if dim < dims => add(local, dim, rank, self.tensor),
            Some(Cut::GateAndUp) if dims > 0 && local.shape[0].is_multiple_of(2) => {
                let half = local.shape[0] / 2;
                for part in 0..2 {
                    let mut rows = local.clone();
                    rows.shape[0] = half;
                    rows.offset += part * half * rows.strides[0] * rows.dtype.size_bytes() as u64;
                    add(rows, 0, part * self.tensor + rank, 2 * self.tensor)?;
                }
                Ok(())
            }
            Some(_) => {
                Err(Fault::new(format!("`{name}` of shape {:?} cannot be cut as its name says", local.shape)))
            }
        }
    }
}

/// What comes before the number of an expert in a name, the number, and what follows.
fn expert_of(name: &str) -> Option<(&str, u64, String)> {
    if let Some((before, rest)) = name.split_once(".local_experts.") {
        let (number, rest) = rest.split_once('.')?;
        return Some((before, number.parse().ok()?, rest.to_owned()));
    }
    // Grouped matrices have their number at the end: `experts.linear_fc1.weight3`.
    let (before, rest) = name.split_once(".experts.linear_fc")?;
    let (map, last) = rest.split_once('.')?;
    let digits = last.trim_start_matches(|letter: char| !letter.is_ascii_digit());
    let kind = last.strip_suffix(digits)?;
    Some((&name[..before.len() + ".experts".len()], digits.parse().ok()?, format!("linear_fc{map}.{kind}")))
}

/// The name in the whole model, and how many layers there are up to that of the parameter. `None` if a number is too large.
fn global_name(name: &str, layers: u64, experts: u64) -> Option<(u64, String)> {
    let mut name = name.to_owned();
    if let Some((before, number, rest)) = expert_of(&name) {
        name = format!("{before}.local_experts.{}.{rest}", number.checked_add(experts)?);
    }
    let Some((number, rest)) = name.strip_prefix("decoder.layers.").and_then(|rest| rest.split_once('.'))
    else {
        return Some((0, name));
    };
    let number: u64 = number.parse().ok().filter(|number| *number < RANKS_MAX)?;
    Some((number + 1, format!("decoder.layers.{}.{rest}", number.checked_add(layers)?)))
}

/// How tensor parallelism cuts a parameter; `None` if it is not known.
fn cut_of(name: &str, is_gated: bool) -> Option<Cut> {
    let ends = |ends: &[&str]| ends.iter().any(|end| name.ends_with(end));
    if name.contains(".experts.") {
        // Experts are cut by a size of their own (`expert_tensor_parallel_size`).
        return None;
    }
    if ends(&["linear_fc1.weight", "linear_fc1.bias"]) {
        return Some(if is_gated { Cut::GateAndUp } else { Cut::Dim(0) });
    }
    if ends(&["word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias"]) {
        return Some(Cut::Dim(0));
    }
    if ends(&["linear_proj.weight", "linear_fc2.weight"]) {
        return Some(Cut::Dim(1));
    }
    let whole = [
        "norm.weight",
        "norm.bias",
        "norm_weight",
        "norm_bias",
        "router.weight",
        "linear_proj.bias",
        "linear_fc2.bias",
    ];
    ends(&whole).then_some(Cut::Whole)
}
