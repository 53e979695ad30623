//! The locations of items in the metadata, looked up by name and first index of the chunk, never by position.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
};

use super::metadata::unexpected;
use crate::{
    error::Fault,
    file_io::is_plain_name,
    pickle::{Graph, Node, NodeId},
};

const FILESYSTEM: &str = "torch.distributed.checkpoint.filesystem";
/// The only stream transform that PyTorch provides.
const ZSTD: &str = "stream.zstd/1";

/// The location of an item.
#[derive(Clone, Debug)]
pub(super) struct Location {
    /// Index of the file in the list of the metadata.
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

/// The location of each item, by name and first index of its chunk (`None` for a value).
pub(super) struct Storage<'a> {
    pub(super) items: HashMap<(&'a str, Option<Vec<u64>>), Location>,
    pub(super) files: Vec<String>,
}

impl<'a> Storage<'a> {
    pub(super) fn read(graph: &'a Graph, root: NodeId) -> Result<Storage<'a>, Fault> {
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
            let item = item_name(name, offset.as_deref());
            let location = storage.location(graph, &mut files, &item, info)?;
            if storage.items.insert((name, offset), location).is_some() {
                return Err(Fault::new(format!("it lists {item} twice")));
            }
        }
        Ok(storage)
    }

    fn location(
        &mut self,
        graph: &'a Graph,
        files: &mut BTreeMap<&'a str, usize>,
        item: &str,
        id: NodeId,
    ) -> Result<Location, Fault> {
        let bad = || unexpected(format!("the place of {item}"), "a file with offset and length");
        if !graph.object(id).is_some_and(|object| object.class.is(FILESYSTEM, "_StorageInfo")) {
            return Err(bad());
        }
        let file = graph.field(id, "relative_path").and_then(|file| graph.str(file)).ok_or_else(bad)?;
        let number = |field| graph.field(id, field).and_then(|number| graph.u64(number)).ok_or_else(bad);
        let (start, len) = (number("offset")?, number("length")?);
        let end = start.checked_add(len).ok_or_else(bad)?;
        if !is_plain_name(file) {
            let rule = "which is not a plain file name; all files lie in one directory";
            return Err(Fault::new(format!("it places {item} in `{file}`, {rule}")));
        }
        let file = *files.entry(file).or_insert_with(|| {
            self.files.push(file.to_owned());
            self.files.len() - 1
        });
        Ok(Location { file, range: start..end, is_zstd: is_zstd(graph, item, id)? })
    }

    pub(super) fn take(&mut self, name: &'a str, offset: Option<&[u64]>) -> Result<Location, Fault> {
        let location = self.items.remove(&(name, offset.map(<[u64]>::to_vec)));
        location.ok_or_else(|| {
            let cause = "the save was not completed, or files were mixed";
            let item = item_name(name, offset);
            Fault::new(format!("it does not give the file of {item}; {cause}"))
        })
    }
}

fn is_zstd(graph: &Graph, item: &str, info: NodeId) -> Result<bool, Fault> {
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
            let reason = format!("{item} has the transforms {texts:?}; only `{ZSTD}` is supported");
            Err(Fault::unsupported(reason))
        }
    }
}
