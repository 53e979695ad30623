//! Reads files of `torch.save` as a tree of values in which each tensor records where its bytes are.
//!
//! Such a file is a zip archive of a pickle (`data.pkl`) and one record per storage (`data/0`, ..). A tensor is a view
//! of a storage: a dtype, a shape, strides and a first element. Storages are not read here, but their lengths are
//! compared with the pickle, and every view is checked against the bounds of its storage.
//!
//! The archive may be a file, a range of a file (an item of a distributed checkpoint) or bytes in memory. The format
//! from before PyTorch 1.6 is supported too; tar archives from before 0.1.10 and big-endian files are refused with a
//! specific message. Devices, gradients and hooks are ignored.

mod attributes;
mod container;
mod item;
mod legacy;
mod opaque;
mod rebuild;
mod storage;

#[cfg(test)]
mod tests;

pub(crate) use attributes::attributes;
pub(crate) use item::{Item, StoredTensor};
pub(crate) use opaque::add_opaque;
pub(crate) use storage::dtype;

use crate::{
    bytes::Section,
    checkpoint::Protection,
    digest::{Digest, DigestKind},
    error::{Error, Fault},
    pickle::{self, Budget, Graph},
    zip::{Archive, Record},
};
use container::Container;
pub(crate) use container::LEGACY_MAGIC;
use rebuild::Builder;

/// The note for a graph whose opaque parts were dropped.
fn note_on(graph: &Graph) -> Option<&'static str> {
    graph.has_forgotten_parts().then_some(FORGOTTEN)
}

/// Objects of unknown classes may refer to each other in cycles.
const FORGOTTEN: &str = "objects of unknown classes hold themselves or are nested too deeply; tensors in such objects are not read";

/// The contents of a `torch.save` file.
#[derive(Debug)]
pub(crate) struct TorchFile {
    /// The object that was saved.
    pub(crate) root: Item,
    /// The folder of its records: the file's name when it was saved, without its ending, or `archive`.
    pub(crate) folder: String,
    /// A note to the user about how the file was read.
    pub(crate) note: Option<&'static str>,
    /// All records with their checksums.
    pub(crate) archive: Archive,
}

impl TorchFile {
    /// The checksums of the records, which are in the source with index `source`. They cover everything but the headers
    /// between the records.
    pub(crate) fn protections(&self, source: usize) -> Vec<Protection> {
        let protection = |(name, record): (&String, &Record)| {
            let digest = Digest { kind: DigestKind::Crc32, value: record.crc32?.into() };
            Some(Protection { source, range: record.data.clone(), digest, what: format!("record {name}") })
        };
        self.archive.records().iter().filter_map(protection).collect()
    }
}

/// Reads the tree of the file that fills `section`.
///
/// # Errors
/// If it is not such a file, is damaged, or holds something unsupported. The error names the file, the item and the
/// problem.
pub(crate) fn open(section: Section<'_>) -> Result<TorchFile, Error> {
    if section.read(0..section.len().min(LEGACY_MAGIC.len() as u64))? == LEGACY_MAGIC {
        return legacy::read(section);
    }
    container::check_magic(section)?;
    read(section, Archive::open(section)?)
}

/// Reads the tree of a file that begins with `section`, which must reach at least the first storage. Only the pickle
/// gives the length of that storage; it may end up to `len_max` bytes from the start.
///
/// # Errors
/// Those of [`open`], and if the records are not in the order in which PyTorch writes them.
pub(crate) fn open_beginning(section: Section<'_>, len_max: u64) -> Result<TorchFile, Error> {
    container::check_magic(section)?;
    read(section, Archive::scan(section, len_max)?)
}

fn read(section: Section<'_>, archive: Archive) -> Result<TorchFile, Error> {
    let container = Container::new(section, &archive)?;
    let graph = graph_of(section, &container)?;
    let mut budget = Budget::default();
    let builder = Builder { graph: &graph, container: &container };
    let root = builder.item(graph.root(), &mut budget);
    let root = root.map_err(|fault| section.fault(fault))?;
    let (folder, note) = (container.folder().to_owned(), note_on(&graph));
    Ok(TorchFile { root, folder, note, archive })
}

/// Parses the pickle of an archive.
fn graph_of(section: Section<'_>, container: &Container<'_>) -> Result<Graph, Error> {
    let start = container.pickle_start();
    let refused = |fault: Fault| section.fault(fault.of_part("its pickle is refused: ", start));
    pickle::parse(&container.pickle()?).map_err(refused)
}
