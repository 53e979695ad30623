//! Files of `torch.save` before PyTorch 1.6: not an archive, but pickles and storages one after another.
//!
//! ```text
//! pickle   a magic number
//! pickle   the version of the protocol, 1001
//! pickle   a dict: the byte order, sizes of types
//! pickle   what was saved, with storages by their keys
//! pickle   the list of keys
//! storages, in the order of the list: the number of elements in 8 bytes, then the elements
//! ```
//!
//! There are no checksums. The position of a storage depends on the previous ones, so all of their lengths are read.

use std::collections::BTreeMap;

use super::{TorchFile, container::Container, rebuild::Builder, storage::element_bytes};
use crate::{
    bytes::Section,
    error::{Error, Fault},
    pickle::{self, Budget, Graph, PICKLE_BYTES_MAX},
    zip::{Archive, Record},
};

/// The protocol version in all such files.
const VERSION: u64 = 1001;

/// Bytes that are read first, and the factor by which this grows each time.
const HEAD_BYTES: u64 = 1 << 20;
const HEAD_GROWTH: u64 = 8;

/// Length of the element count before a storage.
const LEN_BYTES: u64 = 8;

/// The folder under which storages are listed as records.
const FOLDER: &str = "legacy";

/// The saved object, the storage keys, and the position of the storages.
struct Pickles {
    root: Graph,
    keys: Graph,
    end: u64,
}

/// Reads the file that fills `section`.
pub(super) fn read(section: Section<'_>) -> Result<TorchFile, Error> {
    let pickles = pickles(section)?;
    let archive = storages(section, &pickles)?;
    let container = Container::without_records(section, &archive, FOLDER);
    let builder = Builder { graph: &pickles.root, container: &container };
    let root =
        builder.item(pickles.root.root(), &mut Budget::default()).map_err(|fault| section.fault(fault))?;
    let note = super::note_on(&pickles.root);
    Ok(TorchFile { root, folder: "archive".to_owned(), note, archive })
}

/// Reads the pickles. Since their length is not recorded, reads more of the file until they parse.
fn pickles(section: Section<'_>) -> Result<Pickles, Error> {
    let most = section.len().min(PICKLE_BYTES_MAX as u64);
    let mut len = most.min(HEAD_BYTES);
    loop {
        let head = section.read(0..len)?;
        match parse(&head) {
            Ok(pickles) => return Ok(pickles),
            Err(_) if len < most => len = (len * HEAD_GROWTH).min(most),
            Err(fault) => return Err(section.fault(fault)),
        }
    }
}

fn parse(head: &[u8]) -> Result<Pickles, Fault> {
    let mut at = 0;
    let mut next = || {
        let (graph, len) = pickle::parse_first(&head[at..])
            .map_err(|fault| fault.of_part("its pickle is refused: ", at as u64))?;
        at += len;
        Ok::<Graph, Fault>(graph)
    };
    let (_, version, system) = (next()?, next()?, next()?);
    let (root, keys) = (next()?, next()?);
    if version.u64(version.root()) != Some(VERSION) {
        return Err(Fault::unsupported(format!("the version of its protocol is not {VERSION}")));
    }
    let order = system.field(system.root(), "little_endian");
    if order.is_none_or(|order| system[order] != pickle::Node::Bool(true)) {
        return Err(Fault::unsupported("it was not saved on a little-endian machine; save it again on one"));
    }
    Ok(Pickles { root, keys, end: at as u64 })
}

/// The storages as records of an archive, named by their keys.
fn storages(section: Section<'_>, pickles: &Pickles) -> Result<Archive, Error> {
    let refused = |reason: String| section.fault(Fault::new(reason));
    let sizes: BTreeMap<&str, u64> = element_bytes(&pickles.root);
    let keys = pickles.keys.items(pickles.keys.root());
    let keys = keys.ok_or_else(|| refused("its list of storages is not a list".to_owned()))?;
    let mut records = Vec::with_capacity(keys.len());
    let mut at = pickles.end;
    for &key in keys {
        let key =
            pickles.keys.str(key).ok_or_else(|| refused("the key of a storage is not text".to_owned()))?;
        let cut = || refused(format!("it ends inside of storage `{key}`: it was truncated; fetch it again"));
        let size = sizes.get(key).copied();
        let size = size.ok_or_else(|| refused(format!("nothing in it gives the type of storage `{key}`")))?;
        let start = at.checked_add(LEN_BYTES).filter(|start| *start <= section.len()).ok_or_else(cut)?;
        let len = section.read(at..start)?.try_into().map(u64::from_le_bytes).expect("eight bytes were read");
        let end = len.checked_mul(size).and_then(|len| start.checked_add(len));
        at = end.filter(|end| *end <= section.len()).ok_or_else(cut)?;
        records
            .push((format!("{FOLDER}/data/{key}"), Record { data: start..at, crc32: None, is_open: false }));
    }
    if at != section.len() {
        return Err(refused(format!("{} bytes follow its last storage", section.len() - at)));
    }
    Archive::of_records(section, records)
}
