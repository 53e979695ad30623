//! What a file of `torch.save` holds: a tree of values in which tensors say where their bytes lie.
//!
//! Such a file is a zip archive of a pickle (`data.pkl`) and one record per storage (`data/0`, ..). Tensors
//! are views of storages: a type, a shape, strides and a first element. Nothing of a storage is read here;
//! its length is compared with what the pickle says, and every view with the storage that it reaches into.
//!
//! The archive may be a file, a range of a file (an item of a distributed checkpoint) or bytes in memory.
//! The form from before PyTorch 1.6 is read too; tar archives from before 0.1.10 and big-endian files are refused by name. Devices that tensors once lived
//! on, gradients and hooks are ignored.

mod container;
mod item;
pub(crate) mod legacy;
mod opaque;
mod rebuild;
mod storage;

#[cfg(test)]
mod tests;

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
use rebuild::Builder;

/// What to say of what was left out of a graph.
fn note_on(graph: &Graph) -> Option<&'static str> {
    graph.has_forgotten_parts().then_some(FORGOTTEN)
}

/// Objects of unknown classes may hold each other in circles.
const FORGOTTEN: &str = "objects of unknown classes hold themselves or are nested too deeply; tensors in such objects are not read";

/// A file of `torch.save`.
#[derive(Debug)]
pub(crate) struct TorchFile {
    /// What was saved.
    pub(crate) root: Item,
    /// The folder of its records: what the file was called when it was saved, without its ending, or `archive`.
    pub(crate) folder: String,
    /// What a person should know of how it was read.
    pub(crate) note: Option<&'static str>,
    /// All records with their checksums.
    pub(crate) archive: Archive,
}

impl TorchFile {
    /// The checksums of the records, which lie in the source of this number. They cover everything but the
    /// headers between them.
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
/// When it is no such file, is damaged, or holds something that is not supported; the error names the file,
/// the item and what is wrong.
pub(crate) fn open(section: Section<'_>) -> Result<TorchFile, Error> {
    if section.read(0..section.len().min(legacy::MAGIC.len() as u64))? == legacy::MAGIC {
        return legacy::read(section);
    }
    container::check_magic(section)?;
    read(section, Archive::open(section)?)
}

/// Reads the tree of a file of which `section` holds the beginning, up to the first storage at least. The
/// length of that storage is known only from the pickle; it may reach up to `len_max` bytes from the start.
///
/// # Errors
/// As [`open`], and when the file is not in the order in which PyTorch writes it.
pub(crate) fn open_beginning(section: Section<'_>, len_max: u64) -> Result<TorchFile, Error> {
    container::check_magic(section)?;
    read(section, Archive::scan(section, len_max)?)
}

fn read(section: Section<'_>, archive: Archive) -> Result<TorchFile, Error> {
    let container = Container::new(section, &archive)?;
    let pickle = container.pickle()?;
    let start = container.pickle_start();
    let refused = |fault: Fault| section.fault(fault.of_part("its pickle is refused: ", start));
    let graph = pickle::parse(&pickle).map_err(refused)?;
    drop(pickle);
    let mut budget = Budget::default();
    let builder = Builder { graph: &graph, container: &container };
    let root = builder.item(graph.root(), &mut budget);
    let root = root.map_err(|fault| section.fault(fault))?;
    let (folder, note) = (container.folder().to_owned(), note_on(&graph));
    Ok(TorchFile { root, folder, note, archive })
}
