//! Detects the format of a set of rank files from the contents of one of them.

use std::path::{Path, PathBuf};

use super::{
    deepspeed,
    rank_file::RankFile,
    rank_files,
    rank_names::{doubt, sets_of},
    xla,
};
use crate::{checkpoint::Checkpoint, error::Error, file_io::Files, torch::Item};

/// A format with one file per rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankKind {
    /// PyTorch/XLA FSDP: [`xla::open`].
    Xla,
    /// PyTorch's distributed or sharded tensors: [`rank_files::open`].
    DTensors,
    /// DeepSpeed ZeRO: [`deepspeed::open`].
    DeepSpeed,
}

impl RankKind {
    /// Detects the format of a file, or of the files in a directory whose names contain a rank; `None` if it is none of
    /// these formats.
    ///
    /// # Errors
    /// If a directory cannot be listed, or the file was not written by `torch.save`.
    pub fn of(path: impl AsRef<Path>) -> Result<Option<RankKind>, Error> {
        let mut first_error = None;
        for set in sets_at(path.as_ref())? {
            match RankKind::of_set(&set) {
                Ok(None) => {}
                Ok(found) => return Ok(found),
                Err(error) => _ = first_error.get_or_insert(error),
            }
        }
        first_error.map_or(Ok(None), Err)
    }

    /// The format of the first file of a set that can be opened, so that a damaged file does not hide it.
    fn of_set(set: &[PathBuf]) -> Result<Option<RankKind>, Error> {
        let mut first_error = None;
        for file in set {
            match RankFile::open(file, &mut Checkpoint::default()) {
                Ok(opened) => return Ok(RankKind::of_root(&opened.root)),
                Err(error) => _ = first_error.get_or_insert(error),
            }
        }
        first_error.map_or(Ok(None), Err)
    }

    fn of_root(root: &Item) -> Option<RankKind> {
        if xla::is_rank_file(root) {
            Some(RankKind::Xla)
        } else if rank_files::is_rank_file(root) {
            Some(RankKind::DTensors)
        } else {
            deepspeed::is_rank_file(root).then_some(RankKind::DeepSpeed)
        }
    }
}

/// The file itself, or the sets of rank files in a directory, those whose names are most certain to contain a rank
/// first.
fn sets_at(path: &Path) -> Result<Vec<Vec<PathBuf>>, Error> {
    let files = Files::anywhere();
    if !files.is_directory(path) {
        return Ok(vec![vec![path.to_owned()]]);
    }
    // DeepSpeed's `latest` file names the directory of the newest checkpoint.
    let dir = deepspeed::directory_of(&files, path)?;
    let sets = if files.is_directory(&dir) { sets_of(&files.list(&dir)?) } else { return Ok(Vec::new()) };
    let mut sets: Vec<_> = sets.iter().collect();
    sets.sort_by_key(|(pattern, _)| doubt(pattern));
    let files = |(_, set): (&String, &Vec<(_, String)>)| set.iter().map(|(_, name)| dir.join(name)).collect();
    Ok(sets.into_iter().map(files).collect())
}
