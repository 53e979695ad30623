//! Where the metadata says that items lie: by name and first index of the chunk, never by position.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
};

use super::metadata::unexpected;
use crate::{
    error::DcpFault,
    pickle::{Graph, Node, NodeId},
};

const FILESYSTEM: &str = "torch.distributed.checkpoint.filesystem";
/// The only transform that PyTorch brings along.
const ZSTD: &str = "stream.zstd/1";

/// The bytes of an item.
#[derive(Clone, Debug)]
pub(super) struct Location {
    /// Index in [`Metadata::files`].
    pub(super) file: usize,
    pub(super) range: Range<u64>,
    pub(super) is_zstd: bool,
}

/// The name of a chunk or value, for messages.
pub(super) fn item_name(name: &str, offsets: Option<&[u64]>) -> String {
    match offsets {
        Some([]) | None => format!("`{name}`"),
        Some(offsets) => format!("`{name}` at {offsets:?}"),
    }
}

/// Where each item lies, by name and first index of its chunk.
pub(super) struct Storage<'a> {
    pub(super) items: HashMap<(&'a str, Option<Vec<u64>>), Location>,
    pub(super) files: Vec<String>,
}

impl<'a> Storage<'a> {
    pub(super) fn read(graph: &'a Graph, root: NodeId) -> Result<Storage<'a>, DcpFault> {
        let pairs = graph.field(root, "storage_data").and_then(|id| graph.pairs(id));
        let pairs = pairs.ok_or_else(|| unexpected("its list of items", "a dict"))?;
        let mut storage = Storage { items: HashMap::with_capacity(pairs.len()), files: Vec::new() };
        let mut files = BTreeMap::new();
        for &(index, info) in pairs {
            let name = graph.field(index, "fqn").and_then(|name| graph.str(name));
            let name = name.ok_or_else(|| unexpected("the index of an item", "a name with an offset"))?;
            let offset = match graph.field(index, "offset") {
                Some(id) if graph[id] != Node::None => Some(
                    graph.dims(id).ok_or_else(|| unexpected(format!("an offset in `{name}`"), "a size"))?,
                ),
                _ => None,
            };
            let location = storage.location(graph, &mut files, &item_name(name, offset.as_deref()), info)?;
            if let Some(offset) = storage.insert(name, offset, location) {
                return Err(DcpFault::TwoItems { item: item_name(name, offset.as_deref()) });
            }
        }
        Ok(storage)
    }

    /// Notes an item; gives the offset back when there is one already.
    fn insert(
        &mut self,
        name: &'a str,
        offset: Option<Vec<u64>>,
        location: Location,
    ) -> Option<Option<Vec<u64>>> {
        let key = (name, offset);
        if self.items.contains_key(&key) {
            return Some(key.1);
        }
        self.items.insert(key, location);
        None
    }

    fn location(
        &mut self,
        graph: &'a Graph,
        files: &mut BTreeMap<&'a str, usize>,
        item: &str,
        id: NodeId,
    ) -> Result<Location, DcpFault> {
        let bad = || unexpected(format!("the place of {item}"), "a file with offset and length");
        if !graph.object(id).is_some_and(|object| object.class.is(FILESYSTEM, "_StorageInfo")) {
            return Err(bad());
        }
        let file = graph.field(id, "relative_path").and_then(|file| graph.str(file)).ok_or_else(bad)?;
        let number = |field| graph.field(id, field).and_then(|number| graph.u64(number)).ok_or_else(bad);
        let (start, len) = (number("offset")?, number("length")?);
        let end = start.checked_add(len).ok_or_else(bad)?;
        if !is_plain_name(file) {
            return Err(DcpFault::EscapesDirectory { item: item.to_owned(), file: file.to_owned() });
        }
        let file = *files.entry(file).or_insert_with(|| {
            self.files.push(file.to_owned());
            self.files.len() - 1
        });
        Ok(Location { file, range: start..end, is_zstd: is_zstd(graph, item, id)? })
    }

    pub(super) fn take(&mut self, name: &'a str, offset: Option<&[u64]>) -> Result<Location, DcpFault> {
        let location = self.items.remove(&(name, offset.map(<[u64]>::to_vec)));
        location.ok_or_else(|| DcpFault::NoItem { item: item_name(name, offset) })
    }
}

fn is_zstd(graph: &Graph, item: &str, info: NodeId) -> Result<bool, DcpFault> {
    let Some(transforms) = graph.field(info, "transform_descriptors") else { return Ok(false) };
    if graph[transforms] == Node::None {
        return Ok(false);
    }
    let texts = graph.items(transforms).and_then(|items| items.iter().map(|&item| graph.str(item)).collect());
    let texts: Vec<&str> =
        texts.ok_or_else(|| unexpected(format!("the list of transforms of {item}"), "a list of texts"))?;
    match texts[..] {
        [] => Ok(false),
        [ZSTD] => Ok(true),
        _ => {
            let transforms = texts.into_iter().map(str::to_owned).collect();
            Err(DcpFault::UnknownTransform { item: item.to_owned(), transforms })
        }
    }
}

/// Whether a file of this name lies directly in the directory.
fn is_plain_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\\', '\0'])
}
