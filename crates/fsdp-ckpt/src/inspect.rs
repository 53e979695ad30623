//! A summary of a checkpoint in numbers.
//!
//! Everything is derived from metadata; no tensor is read. [`verify`](crate::verify) checks that the bytes are sound.

use std::{collections::BTreeMap, path::PathBuf};

use crate::{
    checkpoint::{Checkpoint, Role, Source},
    error::Error,
    safetensors::TensorType,
};

/// The totals of a set of tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Number of tensors.
    pub tensors: usize,
    /// Total number of elements.
    pub elements: u64,
    /// Total bytes.
    pub bytes: u64,
}

/// A checkpoint in numbers.
#[derive(Debug, Default)]
pub struct Summary {
    /// The file or directory that was opened.
    pub path: PathBuf,
    /// The format in words, with its variant ("PyTorch DCP 1.0.0, zstd").
    pub format: String,
    /// Number of ranks that wrote it; `None` if the format does not record it.
    pub world_size: Option<usize>,
    /// Totals of all tensors.
    pub totals: Totals,
    /// Totals by role in training.
    pub by_role: BTreeMap<Role, Totals>,
    /// Totals by element type.
    pub by_dtype: BTreeMap<TensorType, Totals>,
    /// Number of chunks of all tensors.
    pub chunks: usize,
    /// Number of values that are not tensors.
    pub values: usize,
    /// Number of files that the checkpoint is read from.
    pub files: usize,
    /// Total bytes of these files, as far as known without reading them.
    pub file_bytes: u64,
    /// Number of checksums in the checkpoint.
    pub checksums: usize,
    /// Facts about the run, in display order.
    pub run_state: Vec<(String, String)>,
    /// Oddities that do not make the checkpoint unreadable.
    pub notes: Vec<String>,
    /// Errors for tensors that are not complete.
    pub problems: Vec<Error>,
}

impl Summary {
    /// Computes the summary, and checks that every tensor is complete.
    pub fn of(checkpoint: &Checkpoint) -> Summary {
        let mut summary = Summary {
            path: checkpoint.path.clone(),
            format: checkpoint.format.clone(),
            world_size: checkpoint.world_size,
            values: checkpoint.values.len(),
            checksums: checkpoint.protections.len(),
            run_state: checkpoint.run_state.clone(),
            notes: checkpoint.notes.clone(),
            ..Summary::default()
        };
        for tensor in checkpoint.tensors.values() {
            let totals = [
                &mut summary.totals,
                summary.by_role.entry(tensor.role).or_default(),
                summary.by_dtype.entry(tensor.dtype).or_default(),
            ];
            for totals in totals {
                totals.tensors += 1;
                totals.elements += tensor.len() * tensor.dtype.values() as u64;
                totals.bytes += tensor.len_bytes();
            }
            summary.chunks += tensor.chunks.len();
            summary.problems.extend(tensor.check_coverage(&checkpoint.sources).err());
        }
        let mut files: BTreeMap<&PathBuf, u64> = BTreeMap::new();
        for source in &checkpoint.sources {
            let bytes = files.entry(source.path()).or_default();
            *bytes = match source {
                Source::File { len, .. } => *len,
                Source::Zstd { range, .. } => range.end,
            }
            .max(*bytes);
        }
        (summary.files, summary.file_bytes) = (files.len(), files.values().sum());
        summary
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random_checkpoint::{RandomCheckpoint, Seeded};

    #[test]
    fn summary_counts_add_up_and_missing_chunks_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let mut made = RandomCheckpoint::write(&mut Seeded(5), dir.path()).checkpoint;
        made.tensors.values_mut().next().unwrap().role = Role::Optimizer;
        let summary = Summary::of(&made);
        assert_eq!(summary.totals.tensors, made.tensors.len());
        assert_eq!(summary.by_role.values().map(|totals| totals.bytes).sum::<u64>(), summary.totals.bytes);
        assert_eq!(
            summary.by_dtype.values().map(|totals| totals.elements).sum::<u64>(),
            summary.totals.elements
        );
        assert_eq!(summary.files, std::fs::read_dir(dir.path()).unwrap().count());
        assert!(summary.problems.is_empty());
        made.tensors.values_mut().for_each(|tensor| tensor.chunks.clear());
        assert!(!Summary::of(&made).problems.is_empty());
    }
}
