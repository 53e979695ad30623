//! Which rank writes which rows of which tensor where: a pure function of names, types, shapes and rows.
//!
//! Every rank computes the same plan without asking the others, and lays out any rank's file from it. Nothing
//! here touches a file.

use std::{ops::Range, path::Path, sync::Arc};

use serde_json::json;

use super::manifest::tensor_text;
use crate::{
    checkpoint::{Key, Role},
    digest::{Digest, DigestKind},
    error::{Error, Fault},
    export,
    ranges::{first_uneven, wide},
    safetensors::{Header, Metadata, TensorSpec},
};

/// The most bytes of a chunk, unless a single row has more.
pub const CHUNK_BYTES_MAX: u64 = 16 << 20;

/// The key in a shard's metadata that says that the shard is nothing without its manifest.
pub(crate) const SHARD_MARK: &str = "fsdp_ckpt_native";

/// What it says: where the truth about this file is.
const SHARD_MARK_VALUE: &str = super::MANIFEST_FILE;

/// A tensor that is saved, and who saves which of its rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedTensor {
    /// Name, dtype and shape of the whole tensor.
    pub spec: TensorSpec,
    /// Its place in a nested state dict; the name alone for parameters.
    pub path: Vec<Key>,
    /// What it is to training.
    pub role: Role,
    /// The rows that each rank saves, for all ranks of the world; an empty range for a rank that saves none
    /// (replicas, ranks beyond the last row). A 0-d tensor has one row.
    pub rows: Vec<Range<usize>>,
}

impl SavedTensor {
    /// Rows of the whole tensor.
    pub fn row_count(&self) -> usize {
        row_count(&self.spec.shape)
    }
}

/// The layout of a save. Cheap to clone, and good for every step of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavePlan {
    shared: Arc<Shared>,
}

#[derive(Debug, PartialEq, Eq)]
struct Shared {
    world_size: usize,
    tensors: Vec<SavedTensor>,
    digest: Digest,
}

/// The file of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankFile {
    /// Its name in the directory.
    pub name: String,
    /// Its layout.
    pub header: Header,
    /// The bytes in front of the data.
    pub prefix: Vec<u8>,
    /// Whose rows it holds, in the order of [`Header::entries`].
    pub shards: Vec<Shard>,
}

/// Rows of a tensor in the file of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Index in [`SavePlan::tensors`].
    pub tensor: usize,
    /// The rows of the tensor.
    pub rows: Range<usize>,
    /// Rows of each chunk but the last, which may have fewer.
    pub chunk_rows: usize,
}

impl SavePlan {
    /// Plans a save. Tensors that have no rows at all are listed in the file of rank 0.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for repeated names, a tensor named `__metadata__`, or sizes beyond what the format holds;
    /// [`Error::Unplanned`] naming the tensor if its rows are not all saved exactly once.
    pub fn new(world_size: usize, tensors: Vec<SavedTensor>) -> Result<SavePlan, Error> {
        let specs = tensors.iter().map(|tensor| tensor.spec.clone()).collect();
        Header::layout(specs, None).map_err(cannot_lay_out)?;
        for tensor in &tensors {
            check_rows(tensor, world_size).map_err(|reason| Error::unplanned("checkpoint", reason))?;
        }
        let digest = digest(world_size, &tensors);
        let plan = SavePlan { shared: Arc::new(Shared { world_size, tensors, digest }) };
        // The first rank lists the tensors without rows too, and has the longest names: its layout bounds all.
        plan.lay_out(0)?;
        Ok(plan)
    }

    /// Number of ranks that save.
    pub fn world_size(&self) -> usize {
        self.shared.world_size
    }

    /// The tensors, in the order given.
    pub fn tensors(&self) -> &[SavedTensor] {
        &self.shared.tensors
    }

    /// A digest of all that the plan depends on; ranks whose digests differ would not fit together.
    pub fn digest(&self) -> Digest {
        self.shared.digest
    }

    /// The layout of a rank's file. Ranks that save nothing have a file without tensors.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if the header would be too long.
    ///
    /// # Panics
    /// When the world has no such rank.
    pub fn lay_out(&self, rank: usize) -> Result<RankFile, Error> {
        assert!(rank < self.world_size(), "rank {rank} of {}", self.world_size());
        let mut shards: Vec<Shard> = Vec::new();
        for (index, tensor) in self.tensors().iter().enumerate() {
            let rows = tensor.rows[rank].clone();
            if !rows.is_empty() || (rank == 0 && tensor.row_count() == 0) {
                let chunk_rows = chunk_rows(&tensor.spec, rows.len());
                shards.push(Shard { tensor: index, rows, chunk_rows });
            }
        }
        // Wide elements come first, so that every tensor is aligned to its elements.
        shards.sort_by_key(|shard| std::cmp::Reverse(self.tensors()[shard.tensor].spec.dtype.size_bytes()));
        let specs = shards.iter().map(|shard| self.shard_spec(shard)).collect();
        let (header, prefix) = Header::layout(specs, Some(self.metadata(&shards))).map_err(cannot_lay_out)?;
        Ok(RankFile { name: file_name(rank), header, prefix, shards })
    }

    fn shard_spec(&self, shard: &Shard) -> TensorSpec {
        let mut spec = self.tensors()[shard.tensor].spec.clone();
        if let Some(first) = spec.shape.first_mut() {
            *first = shard.rows.len();
        }
        spec
    }

    /// What PyTorch's reader needs to know: where in the tensor the rows of this file begin. And our mark, which
    /// it ignores: without the manifest these files must not pass for shards that PyTorch wrote.
    fn metadata(&self, shards: &[Shard]) -> Metadata {
        let mut info = serde_json::Map::new();
        for shard in shards {
            let spec = &self.tensors()[shard.tensor].spec;
            let mut offsets = vec![0; spec.shape.len()];
            if let Some(first) = offsets.first_mut() {
                *first = shard.rows.start;
            }
            info.insert(spec.name.clone(), json!({ "saved_offsets": offsets }));
        }
        let info = serde_json::Value::Object(info).to_string();
        let pairs = [
            ("format", "pt"),
            ("DCP_VERSION", "1.0"),
            ("DCP_SHARDING_INFO", &info),
            (SHARD_MARK, SHARD_MARK_VALUE),
        ];
        pairs.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    }
}

impl RankFile {
    /// The chunks of a shard: rows of the tensor, and bytes of the file.
    pub fn chunks(&self, shard: usize) -> impl ExactSizeIterator<Item = (Range<usize>, Range<u64>)> + '_ {
        let entry = &self.header.entries()[shard];
        let Shard { rows, chunk_rows, .. } = &self.shards[shard];
        let start = self.header.data_start() + entry.data_range().start;
        (0..rows.len().div_ceil(*chunk_rows)).map(move |chunk| {
            let first = rows.start + chunk * chunk_rows;
            let end = rows.end.min(first + chunk_rows);
            let byte_of = |row: usize| start + (row - rows.start) as u64 * entry.row_bytes();
            (first..end, byte_of(first)..byte_of(end))
        })
    }
}

/// The rows of each rank when each has `ceil(row_count / world_size)` until none are left.
///
/// # Panics
/// When there are no ranks.
pub fn even_rows(row_count: usize, world_size: usize) -> Vec<Range<usize>> {
    let share = row_count.div_ceil(world_size);
    (0..world_size).map(|rank| (rank * share).min(row_count)..((rank + 1) * share).min(row_count)).collect()
}

/// Rows of a tensor of this shape.
pub(super) fn row_count(shape: &[usize]) -> usize {
    shape.first().copied().unwrap_or(1)
}

/// The name of a rank's file: the pattern of PyTorch's `HuggingFaceStorageWriter`.
pub(super) fn file_name(rank: usize) -> String {
    format!("shard-{:05}-model-00001-of-00001.safetensors", rank + 1)
}

fn chunk_rows(spec: &TensorSpec, rows: usize) -> usize {
    let elements: u64 = spec.shape.iter().skip(1).map(|&size| size as u64).product();
    let row_bytes = elements * spec.dtype.size_bytes() as u64;
    let fitting = CHUNK_BYTES_MAX.checked_div(row_bytes).map_or(usize::MAX, |rows| rows as usize);
    fitting.min(rows).max(1)
}

/// Why the rows of a tensor are not all saved exactly once.
fn check_rows(tensor: &SavedTensor, world_size: usize) -> Result<(), String> {
    let (name, row_count, got) = (&tensor.spec.name, tensor.row_count(), tensor.rows.len());
    if got != world_size || world_size == 0 {
        return Err(format!("tensor `{name}` lists rows for {got} ranks, but the world has {world_size}"));
    }
    let ranks = tensor.rows.iter().enumerate();
    for (rank, Range { start, end }) in ranks.clone().filter(|(_, rows)| rows.start != rows.end) {
        if start > end || *end > row_count {
            let rows = format!("rows {start}..{end} of tensor `{name}`, which has {row_count}");
            return Err(format!("rank {rank} is to save {rows}"));
        }
    }
    let runs = ranks.map(|(rank, rows)| (wide(rows), rank));
    let Some((Range { start, end }, holders)) = first_uneven(row_count as u64, runs) else { return Ok(()) };
    let savers = match holders {
        None => "no rank".to_owned(),
        Some((first, second)) => format!("ranks {first} and {second}; replicas save nothing"),
    };
    Err(format!("rows {start}..{end} of tensor `{name}` are saved by {savers}"))
}

fn digest(world_size: usize, tensors: &[SavedTensor]) -> Digest {
    let describe = |tensor: &SavedTensor| {
        let rows: Vec<[usize; 2]> = tensor.rows.iter().map(|rows| [rows.start, rows.end]).collect();
        let text = tensor_text(&tensor.spec, &tensor.path, tensor.role);
        json!([tensor.spec.name, text, rows]).to_string()
    };
    let mut text = world_size.to_string();
    tensors.iter().for_each(|tensor| text.push_str(&describe(tensor)));
    DigestKind::Crc64.of(text.as_bytes())
}

fn cannot_lay_out(fault: Fault) -> Error {
    export::cannot_lay_out(Path::new(&file_name(0)), &fault)
}

#[cfg(test)]
mod tests;
