//! The `torch.save` files of all ranks, opened together as the sources of one checkpoint.

use std::path::{Path, PathBuf};

use super::{
    rank_fault::other_name,
    rank_names::{RankName, RankSet},
    tree::add_tree,
};
use crate::{
    bytes::Section,
    checkpoint::{Checkpoint, Global, Role, Source, Value},
    error::{Error, Fault},
    file_io::PathFile,
    formats::fields::text,
    torch::{self, Item, add_opaque},
};

/// An open rank file.
#[derive(Debug)]
pub(crate) struct RankFile {
    /// Its path.
    pub(crate) path: PathBuf,
    /// Its index in the checkpoint's sources.
    pub(crate) source: usize,
    /// The name it was saved under, without its ending.
    pub(crate) folder: String,
    /// The root of its tree.
    pub(crate) root: Item,
    /// Whether the archive records the file's rank, and its name agrees.
    pub(crate) rank_is_verified: bool,
}

impl RankFile {
    /// Opens a file and adds it, with its checksums, to the sources of a checkpoint.
    pub(crate) fn open(path: &Path, into: &mut Checkpoint) -> Result<RankFile, Error> {
        let (file, len) = PathFile::open(path)?;
        let torch_file = torch::open(Section::new(&file, 0..len, path, ""))?;
        let rank_is_verified = check_saved_name(path, &torch_file.folder)?;
        let source = into.sources.len();
        into.sources.push(Source::File { path: path.to_owned(), len });
        into.protections.extend(torch_file.protections(source));
        add_opaque(&torch_file.root, &[], &mut into.opaque);
        into.notes.extend(torch_file.note.map(str::to_owned));
        let (path, folder, root) = (path.to_owned(), torch_file.folder, torch_file.root);
        Ok(RankFile { path, source, folder, root, rank_is_verified })
    }

    /// Opens all files of a set, in rank order.
    pub(crate) fn open_all(set: &RankSet, into: &mut Checkpoint) -> Result<Vec<RankFile>, Error> {
        set.iter().map(|path| RankFile::open(path, into)).collect()
    }

    /// The error for a part of this file that is not as expected.
    pub(crate) fn unexpected(&self, place: impl AsRef<str>, expected: &str) -> Error {
        Fault::unexpected(place, expected).in_file(&self.path)
    }

    /// Adds the entries of the root whose keys are not in `known`.
    pub(crate) fn add_unknown(&self, known: &[&str], into: &mut Checkpoint) -> Result<(), Error> {
        let Item::Dict(items) = &self.root else { return Ok(()) };
        let is_known = |key: &Value| text(key).is_some_and(|key| known.contains(&key));
        let others = items.iter().filter(|(key, _)| !is_known(key)).cloned().collect();
        self.add_others(others, Role::Other, into)
    }

    /// Flattens `items`, which are part of this file, and adds the tensors and values in them.
    pub(crate) fn add_others(
        &self,
        items: Vec<(Value, Item)>,
        role: Role,
        into: &mut Checkpoint,
    ) -> Result<(), Error> {
        let wrapped =
            |name: &str, _: &Global| Fault::unexpected(format!("`{name}`"), "a plain tensor or value here");
        add_tree(&Item::Dict(items), self.source, role, wrapped, into)
            .map_err(|fault| fault.in_file(&self.path))
    }
}

/// Compares the rank in a file's name with the rank in the name it was saved under, which is the folder in its archive.
/// Returns whether the latter records a rank; a file that was renamed on purpose has other text around the rank.
fn check_saved_name(path: &Path, folder: &str) -> Result<bool, Error> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let extension = name.rfind('.').map_or("", |at| &name[at..]);
    let saved_as = format!("{folder}{extension}");
    match (RankName::parse(&name), RankName::parse(&saved_as)) {
        (Some(named), Some(saved)) if named.pattern == saved.pattern => match named.rank == saved.rank {
            true => Ok(true),
            false => Err(other_name(&saved_as, saved.rank, named.rank).in_file(path)),
        },
        _ => Ok(false),
    }
}
