//! What a checkpoint holds, in numbers: for people who want to know what they have.
//!
//! Everything follows from metadata; no tensor is read. Whether the bytes are sound is the business of
//! [`verify`](crate::verify).

use std::{collections::BTreeMap, path::PathBuf};

use crate::{
    checkpoint::{Checkpoint, Role, Source},
    error::Error,
    safetensors::TensorType,
};

/// Tensors of one kind, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Tensors.
    pub tensors: usize,
    /// Elements of all of them.
    pub elements: u64,
    /// Bytes of all of them.
    pub bytes: u64,
}

/// A checkpoint in numbers.
#[derive(Debug, Default)]
pub struct Summary {
    /// What was opened.
    pub path: PathBuf,
    /// The format in words.
    pub format: String,
    /// Ranks that wrote it, where the format says.
    pub world_size: Option<usize>,
    /// All tensors.
    pub totals: Totals,
    /// Tensors by what they are to training.
    pub by_role: BTreeMap<Role, Totals>,
    /// Tensors by element type.
    pub by_dtype: BTreeMap<TensorType, Totals>,
    /// Chunks of all tensors.
    pub chunks: usize,
    /// Values that are not tensors.
    pub values: usize,
    /// Files that hold tensors.
    pub files: usize,
    /// Bytes of these files, as far as they are known without reading them.
    pub file_bytes: u64,
    /// Checksums that the format keeps.
    pub checksums: usize,
    /// Facts about the run, in the order to show.
    pub run_state: Vec<(String, String)>,
    /// What is odd.
    pub notes: Vec<String>,
    /// Tensors that are not whole.
    pub problems: Vec<Error>,
}

impl Summary {
    /// Counts, and checks that every tensor is whole.
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
                totals.elements += tensor.len();
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
    fn counts_add_up_and_what_is_missing_is_a_problem() {
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
