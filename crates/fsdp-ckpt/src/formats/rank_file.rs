//! Files of `torch.save`, one per rank, opened together as the sources of one checkpoint.

use std::path::{Path, PathBuf};

use super::{
    rank_fault::{other_name, same_name},
    rank_names::{RankName, RankSet},
};
use crate::{
    bytes::Section,
    checkpoint::{Checkpoint, Object, Role, Source, Value, flatten, join},
    error::{Error, Fault},
    file_io::PathFile,
    formats::{fields::text, local::LocalTensor},
    torch::{self, Item, add_opaque},
};

/// What the file of a rank holds.
#[derive(Debug)]
pub(crate) struct RankFile {
    /// The file.
    pub(crate) path: PathBuf,
    /// Its index among the sources of the checkpoint.
    pub(crate) source: usize,
    /// Its tree.
    pub(crate) root: Item,
    /// Whether it says of itself of which rank it is, and its name says the same.
    pub(crate) tells_rank: bool,
}

impl RankFile {
    /// Opens a file and adds it to the sources, with the checksums in it.
    pub(crate) fn open(path: &Path, into: &mut Checkpoint) -> Result<RankFile, Error> {
        let (file, len) = PathFile::open(path)?;
        let torch_file = torch::open(Section::new(&file, 0..len, path, ""))?;
        let tells_rank = check_saved_name(path, &torch_file.folder)?;
        let source = into.sources.len();
        into.sources.push(Source::File { path: path.to_owned(), len });
        into.protections.extend(torch_file.protections(source));
        add_opaque(&torch_file.root, &[], &mut into.opaque);
        into.notes.extend(torch_file.note.map(str::to_owned));
        Ok(RankFile { path: path.to_owned(), source, root: torch_file.root, tells_rank })
    }

    /// Opens all files of a set, in the order of ranks.
    pub(crate) fn open_all(set: &RankSet, into: &mut Checkpoint) -> Result<Vec<RankFile>, Error> {
        set.iter().map(|path| RankFile::open(path, into)).collect()
    }

    /// The error that says that something in this file is not what it should be.
    pub(crate) fn unexpected(&self, place: impl AsRef<str>, expected: &str) -> Error {
        Fault::unexpected(place, expected).in_file(&self.path)
    }

    /// Adds what is under other keys than these.
    pub(crate) fn add_unknown(&self, known: &[&str], into: &mut Checkpoint) -> Result<(), Error> {
        let Item::Dict(items) = &self.root else { return Ok(()) };
        let is_known = |key: &Value| text(key).is_some_and(|key| known.contains(&key));
        let others = items.iter().filter(|(key, _)| !is_known(key)).cloned().collect();
        self.add_others(others, Role::Other, into)
    }

    /// Flattens `items`, which are a part of the file, and adds what is in them.
    pub(crate) fn add_others(
        &self,
        items: Vec<(Value, Item)>,
        role: Role,
        into: &mut Checkpoint,
    ) -> Result<(), Error> {
        let root = Item::Dict(items);
        let leaves = flatten(&root).map_err(|fault| fault.in_file(&self.path))?;
        for (path, item) in leaves {
            let name = join(&path);
            let is_new = match item {
                Item::Tensor(stored) => {
                    let tensor = LocalTensor::of(stored, self.source).to_tensor(path, role);
                    into.tensors.insert(name.clone(), tensor).is_none()
                }
                Item::Wrapped { .. } => {
                    return Err(self.unexpected(format!("`{name}`"), "a plain tensor or value here"));
                }
                item => {
                    if item.holds_tensor() {
                        into.notes.push(format!("the object `{name}` holds tensors, which are not read"));
                    }
                    let object = Object { path, role, value: item.to_value() };
                    into.values.insert(name.clone(), object).is_none()
                }
            };
            if !is_new {
                return Err(same_name(&name).in_file(&self.path));
            }
        }
        Ok(())
    }
}

/// Compares the name of a file with the one that it was saved under, which is the folder in its archive; whether that says a
/// rank. Files that were renamed on purpose have other names around the rank.
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
