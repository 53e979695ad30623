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

/// Reads the checkpoint of a format with one file per rank.
type Reader = fn(&Path) -> Result<Checkpoint, Error>;

/// The reader for a file, or for the files in a directory whose names contain a rank; `None` if it is none of these
/// formats.
///
/// # Errors
/// If a directory cannot be listed, or the file was not written by `torch.save`.
pub(super) fn reader_of(path: &Path) -> Result<Option<Reader>, Error> {
    let mut first_error = None;
    for set in sets_at(path)? {
        // The first file of a set that can be opened tells, so that a damaged file does not hide the format.
        let mut error_in_set = None;
        for file in set {
            match RankFile::open(&file, &mut Checkpoint::default()) {
                Ok(file) => {
                    if let Some(reader) = reader_for(&file.root) {
                        return Ok(Some(reader));
                    }
                    error_in_set = None;
                    break;
                }
                Err(error) => _ = error_in_set.get_or_insert(error),
            }
        }
        first_error = first_error.or(error_in_set);
    }
    first_error.map_or(Ok(None), Err)
}

fn reader_for(root: &Item) -> Option<Reader> {
    if xla::is_rank_file(root) {
        Some(|path| xla::open(path))
    } else if rank_files::is_rank_file(root) {
        Some(|path| rank_files::open(path))
    } else {
        deepspeed::is_rank_file(root).then_some(|path| deepspeed::open(path))
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
