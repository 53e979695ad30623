//! Which format files per rank are of, by what is in one of them.

use std::path::{Path, PathBuf};

use super::{deepspeed, rank_file::RankFile, rank_files, rank_names::sets_of, xla};
use crate::{checkpoint::Checkpoint, error::Error, file_io::Files};

/// A format of files per rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankKind {
    /// PyTorch/XLA FSDP: [`xla::open`].
    Xla,
    /// Distributed tensors of PyTorch: [`rank_files::open`].
    DTensors,
    /// DeepSpeed ZeRO: [`deepspeed::open`].
    DeepSpeed,
}

impl RankKind {
    /// The format of a file, or of the files in a directory whose names say a rank; `None` where it is none of
    /// these formats.
    ///
    /// # Errors
    /// When a directory cannot be listed, or the file is none of `torch.save`.
    pub fn of(path: impl AsRef<Path>) -> Result<Option<RankKind>, Error> {
        let Some(file) = one_file(path.as_ref())? else { return Ok(None) };
        let root = RankFile::open(&file, &mut Checkpoint::default())?.root;
        Ok(if xla::is_rank_file(&root) {
            Some(RankKind::Xla)
        } else if rank_files::is_rank_file(&root) {
            Some(RankKind::DTensors)
        } else if deepspeed::is_rank_file(&root) {
            Some(RankKind::DeepSpeed)
        } else {
            None
        })
    }
}

/// The file itself, or the first one of a directory whose name says a rank.
fn one_file(path: &Path) -> Result<Option<PathBuf>, Error> {
    let files = Files::anywhere();
    if !files.is_directory(path) {
        return Ok(Some(path.to_owned()));
    }
    // DeepSpeed names the directory of the newest checkpoint in a file.
    let dir = deepspeed::directory_of(&files, path)?;
    let sets = if files.is_directory(&dir) { sets_of(&files.list(&dir)?) } else { return Ok(None) };
    Ok(sets.values().next().and_then(|set| set.first()).map(|(_, name)| dir.join(name)))
}
