//! The older checkpoints of Megatron-LM (`--ckpt-format torch`): a folder for each rank of the model.
//!
//! ```text
//! mp_rank_00_000/model_optim_rng.pt     tensor rank 0, stage 0; where there are stages, the second number is theirs,
//! mp_rank_00_001/model_optim_rng.pt     and where experts are distributed, the last one is theirs
//! ```
//!
//! Each file has the part of the model under local names: layers and experts count from 0 in every stage and rank. With
//! virtual stages, `model0`, `model1`, .. are its chunks, and the layers of all first chunks come before those of all second
//! ones. Which dimension tensor parallelism cuts follows from the name. States are numbered in the order of a rank's
//! parameters; those of a distributed optimizer are in buffers, whose parameters only the running model knows, and are not
//! read.

mod names;
mod optimizer;
mod parts;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use names::{RANKS_MAX, expert_of, global_name};

use super::{
    fields::{count, field, text},
    local::LocalTensor,
    merge::{RankParts, merge},
    rank_file::RankFile,
};
use crate::{
    checkpoint::{Checkpoint, EXTRA_STATE, Role, Value},
    error::Error,
    file_io::Files,
    torch::Item,
};

/// The file in each folder.
const FILE: &str = "model_optim_rng.pt";

/// The states of the distributed optimizer in a folder, in buffers whose parameters only the running model knows.
pub(super) const BUFFERS_FILE: &str = "distrib_optim.pt";

/// What the folders of ranks begin with.
const FOLDER: &str = "mp_rank_";

/// The note of a checkpoint without states that could be named.
const NO_STATES: &str = "the states of its optimizer are not read: it is distributed, or its groups of parameters are not those that \
                         Megatron-LM makes by itself";

/// What cannot be seen in these folders.
const UNSEEN: &str = "files exchanged between ranks whose parts have the same shapes: Megatron does not store the rank in them";

/// The numbers of a rank: of tensor parallelism, of its stage and of its experts.
type Rank = (u64, u64, u64);

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
    let files = sizes.files(dir, folders.len(), &mut checkpoint)?;
    checkpoint.world_size = Some(files.len());
    let parameters = sizes.parameters(&files)?;
    let states = parameters.iter().map(|(rank, of_rank)| {
        let file = &files[rank];
        Some((*rank, optimizer::states(file.root.get("optimizer")?, of_rank, file.source)?))
    });
    let states: Option<BTreeMap<Rank, Vec<optimizer::State>>> = states.collect();
    if states.is_none() {
        checkpoint.notes.push(NO_STATES.to_owned());
    }
    let mut ranks = Vec::new();
    for (rank, of_rank) in &parameters {
        let (path, none) = (files[rank].path.clone(), Vec::new());
        let of_optimizer = states.as_ref().map_or(&none, |states| &states[rank]);
        let parts = sizes.parts(rank.0, of_rank, of_optimizer).map_err(|fault| fault.in_file(&path))?;
        ranks.push(RankParts { path, parts });
    }
    merge(&ranks, &mut checkpoint)?;
    add_others(&files[&(0, 0, 0)], &mut checkpoint)?;
    checkpoint.limits.push(UNSEEN.to_owned());
    Ok(checkpoint)
}

/// Adds what is neither model nor optimizer, and the iteration as a fact about the run.
fn add_others(first: &RankFile, into: &mut Checkpoint) -> Result<(), Error> {
    let iteration = first.root.get("iteration").map(Item::to_value).as_ref().and_then(count);
    into.run_state.extend(iteration.map(|number| ("step".to_owned(), number.to_string())));
    let Item::Dict(items) = &first.root else { return Ok(()) };
    let known = ["optimizer", "model", "rng_state"];
    let is_rest = |key: &Value| text(key).is_some_and(|key| !known.contains(&key) && !is_chunk(key));
    first.add_others(items.iter().filter(|(key, _)| is_rest(key)).cloned().collect(), Role::Other, into)
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

    /// Opens the files of all ranks.
    fn files(
        &self,
        dir: &Path,
        folders: usize,
        into: &mut Checkpoint,
    ) -> Result<BTreeMap<Rank, RankFile>, Error> {
        let mut files = BTreeMap::new();
        for tensor in 0..self.tensor {
            for stage in 0..self.stages {
                for expert in 0..self.experts {
                    let path = dir.join(self.folder(tensor, stage, expert)).join(FILE);
                    if !Files::anywhere().exists(&path) {
                        let reason = "it is missing: the files of all ranks are needed; fetch it";
                        return Err(Error::malformed(path, reason));
                    }
                    files.insert((tensor, stage, expert), RankFile::open(&path, into)?);
                }
            }
        }
        if folders == files.len() {
            return Ok(files);
        }
        let of_save = files.len();
        let reason =
            format!("it has {folders} folders of ranks, and {of_save} of one save; files were mixed");
        Err(Error::malformed(dir, reason))
    }

    /// The parameters of each rank in their order, under the names of the whole model.
    fn parameters(
        &self,
        files: &BTreeMap<Rank, RankFile>,
    ) -> Result<BTreeMap<Rank, Vec<(String, LocalTensor)>>, Error> {
        let mut layers = 0;
        let mut parameters: BTreeMap<Rank, Vec<(String, LocalTensor)>> = BTreeMap::new();
        for chunk in 0..self.chunks {
            for stage in 0..self.stages {
                let mut of_stage = 0;
                for (&rank, file) in files.iter().filter(|((_, at, _), _)| *at == stage) {
                    let of_rank = parameters.entry(rank).or_default();
                    of_stage = of_stage.max(self.add_chunk(file, chunk, layers, rank, of_rank)?);
                }
                layers += of_stage;
            }
        }
        Ok(parameters)
    }

    /// Adds the tensors in a chunk of a rank, whose layers come after `layers` others. Returns the number of its layers.
    fn add_chunk(
        &self,
        file: &RankFile,
        chunk: u64,
        layers: u64,
        (_, _, expert): Rank,
        parameters: &mut Vec<(String, LocalTensor)>,
    ) -> Result<u64, Error> {
        let key = if file.root.get("model").is_some() { "model".to_owned() } else { format!("model{chunk}") };
        let Some(Item::Dict(items)) = file.root.get(&key) else {
            return Err(file.unexpected(format!("`{key}`"), "a dict of the parameters"));
        };
        let per_rank = items
            .iter()
            .filter_map(|(key, _)| expert_of(text(key)?))
            .map(|(_, number, _)| number.saturating_add(1))
            .max();
        let mut found = 0;
        for (name, item) in items {
            let (Some(name), Item::Tensor(stored)) = (text(name), item) else { continue };
            if name.contains(EXTRA_STATE) {
                continue;
            }
            let local = LocalTensor::of(stored, file.source);
            let (number, name) = global_name(name, layers, expert.saturating_mul(per_rank.unwrap_or(0)))
                .ok_or_else(|| {
                    file.unexpected(format!("`{name}`"), "the name of a parameter with numbers in range")
                })?;
            found = found.max(number);
            parameters.push((name, local));
        }
        Ok(found)
    }
}
