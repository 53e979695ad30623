//! Assigns rows of tensors to ranks and file offsets: a pure function of names, dtypes, shapes and rows.
//!
//! Every rank computes the same plan without communication, and can lay out any rank's file from it. This module does
//! no I/O.

use std::{ops::Range, path::Path, sync::Arc};

use fsdp_core::distribution::shard;
use serde_json::json;

use super::manifest::tensor_text;
use crate::{
    checkpoint::{Key, Role},
    digest::{Digest, DigestKind},
    error::{Error, Fault},
    export,
    ranges::{first_coverage_fault, wide},
    safetensors::{Header, Metadata, TensorSpec, row_bytes},
};

/// Maximum bytes per chunk, unless a single row is longer.
pub const CHUNK_BYTES_MAX: u64 = 16 << 20;

/// The metadata key that marks a shard as unusable without its manifest.
pub(crate) const SHARD_MARK: &str = "fsdp_ckpt_native";

/// The value of the mark: the file that describes the shard.
const SHARD_MARK_VALUE: &str = super::MANIFEST_FILE;

/// A tensor to save, and the assignment of its rows to ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedTensor {
    /// Name, dtype and shape of the whole tensor.
    pub spec: TensorSpec,
    /// Path in a nested state dict; only the name for parameters.
    pub path: Vec<Key>,
    /// Role in training.
    pub role: Role,
    /// The rows that each rank saves, for all ranks of the world; empty for a rank that saves none (replicas, ranks
    /// beyond the last row). A 0-d tensor has one row.
    pub rows: Vec<Range<usize>>,
}

impl SavedTensor {
    /// Number of rows of the whole tensor.
    pub fn row_count(&self) -> usize {
        row_count(&self.spec.shape)
    }
}

/// The layout of a save. It is cheap to clone, and the same for every step of a run.
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
    /// Name of the file in the directory.
    pub name: String,
    /// The safetensors header.
    pub header: Header,
    /// The bytes before the data.
    pub prefix: Vec<u8>,
    /// The rows in the file, in the order of [`Header::entries`].
    pub shards: Vec<Shard>,
}

/// Rows of a tensor in the file of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Index in [`SavePlan::tensors`].
    pub tensor: usize,
    /// The range of rows, counted in the whole tensor.
    pub rows: Range<usize>,
    /// Rows per chunk; the last chunk may have fewer.
    pub chunk_rows: usize,
}

impl SavePlan {
    /// Plans a save. Tensors without any rows are listed in the file of rank 0.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for repeated names, a tensor named `__metadata__`, or sizes that the format cannot
    /// represent; [`Error::Unplanned`] with the name of a tensor whose rows are not all saved exactly once.
    pub fn new(world_size: usize, tensors: Vec<SavedTensor>) -> Result<SavePlan, Error> {
        let specs = tensors.iter().map(|tensor| tensor.spec.clone()).collect();
        Header::layout(specs, None).map_err(cannot_lay_out)?;
        for tensor in &tensors {
            check_rows(tensor, world_size).map_err(|reason| Error::unplanned("checkpoint", reason))?;
        }
        let digest = digest(world_size, &tensors);
        let plan = SavePlan { shared: Arc::new(Shared { world_size, tensors, digest }) };
        // The header of rank 0, which also lists the tensors without rows, bounds those of all ranks: if it is not too
        // long, none is.
        plan.lay_out(0)?;
        Ok(plan)
    }

    /// Number of ranks that save.
    pub fn world_size(&self) -> usize {
        self.shared.world_size
    }

    /// The tensors, in the order in which they were passed.
    pub fn tensors(&self) -> &[SavedTensor] {
        &self.shared.tensors
    }

    /// A digest of everything that the plan depends on; ranks with different digests would not fit together.
    pub fn digest(&self) -> Digest {
        self.shared.digest
    }

    /// Returns the layout of a rank's file. A rank that saves nothing has a file without tensors.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if the header would be too long.
    ///
    /// # Panics
    /// If the world does not have this rank.
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
        // Wide elements first, so that every tensor is aligned to its element size.
        shards.sort_by_key(|shard| std::cmp::Reverse(self.tensors()[shard.tensor].spec.dtype.alignment()));
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

    /// The metadata of a file: the offsets of its rows in the tensors, which PyTorch's reader needs, and our mark,
    /// which it ignores. Without a manifest these files must not pass for shards that PyTorch wrote.
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
    /// Returns the chunks of a shard: row range in the tensor, and byte range in the file.
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

/// Splits rows evenly: each rank gets `ceil(row_count / world_size)` until none are left.
///
/// # Panics
/// If `world_size` is 0.
pub fn even_rows(row_count: usize, world_size: usize) -> Vec<Range<usize>> {
    let of_rank = |rank| shard(row_count as u64, world_size as u64, rank as u64);
    (0..world_size).map(of_rank).map(|rows| rows.start as usize..rows.end as usize).collect()
}

/// Number of rows of a tensor of this shape.
pub(super) fn row_count(shape: &[usize]) -> usize {
    shape.first().copied().unwrap_or(1)
}

/// Name of a rank's file, following the pattern of PyTorch's `HuggingFaceStorageWriter`.
pub(super) fn file_name(rank: usize) -> String {
    format!("shard-{:05}-model-00001-of-00001.safetensors", rank + 1)
}

fn chunk_rows(spec: &TensorSpec, rows: usize) -> usize {
    let fitting = CHUNK_BYTES_MAX
        .checked_div(row_bytes(&spec.shape, spec.dtype))
        .map_or(usize::MAX, |rows| rows as usize);
    fitting.min(rows).max(1)
}

/// Checks that the rows of a tensor are all saved exactly once.
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
    let Some((Range { start, end }, holders)) = first_coverage_fault(row_count as u64, runs) else {
        return Ok(());
    };
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
