//! What `.metadata` says, checked for itself: names, shapes, boxes, and the place of each item.
//!
//! The classes are PyTorch's. Their states differ by version: tensor properties are a tuple of five parts, or of
//! six since torch 2.15; torch 2.1 and 2.2 keep them in another module; some fields came later. The version
//! that the metadata gives does not tell these apart, so everything is judged by what is there.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
};

use crate::{
    checkpoint::{Key, join},
    error::DcpFault,
    pickle::{Graph, Node, NodeId},
    safetensors::TensorType,
    torch::dtype,
};

/// The name of a tool whose metadata has a field of its own.
pub(super) const MEGATRON: &str = "Megatron Core";

const METADATA: &str = "torch.distributed.checkpoint.metadata";
const FILESYSTEM: &str = "torch.distributed.checkpoint.filesystem";
const ZSTD: &str = "stream.zstd/1";

/// The metadata of a checkpoint.
#[derive(Debug)]
pub(super) struct Metadata {
    pub(super) version: Option<String>,
    /// Names of the files, each a plain name.
    pub(super) files: Vec<String>,
    pub(super) entries: Vec<Entry>,
    pub(super) notes: Vec<String>,
}

/// A tensor or value.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) path: Vec<Key>,
    pub(super) kind: Kind,
}

#[derive(Debug)]
pub(super) enum Kind {
    Value(Location),
    Tensor { dtype: TensorType, shape: Vec<u64>, chunks: Vec<ChunkEntry> },
}

/// A box of a tensor, inside of it.
#[derive(Debug)]
pub(super) struct ChunkEntry {
    pub(super) offsets: Vec<u64>,
    pub(super) sizes: Vec<u64>,
    pub(super) location: Location,
}

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

fn unexpected(place: impl Into<String>, expected: &'static str) -> DcpFault {
    DcpFault::Unexpected { place: place.into(), expected }
}

impl Metadata {
    pub(super) fn read(graph: &Graph) -> Result<Metadata, DcpFault> {
        let root = graph.root();
        if !graph.object(root).is_some_and(|object| object.class.is(METADATA, "Metadata")) {
            return Err(unexpected("its root", "the metadata of a distributed checkpoint"));
        }
        if graph.field(root, "mcore_data").is_some() {
            return Err(DcpFault::OtherTool { tool: MEGATRON });
        }
        let mut storage = Storage::read(graph, root)?;
        let mut paths = Paths::read(graph, root);
        let listed = graph.field(root, "state_dict_metadata").and_then(|id| graph.pairs(id));
        let listed = listed.ok_or_else(|| unexpected("its list of tensors", "a dict"))?;
        let mut entries = Vec::with_capacity(listed.len());
        for &(name, entry) in listed {
            let name = graph.str(name).ok_or_else(|| unexpected("the name of a tensor", "a text"))?;
            let kind = read_kind(graph, name, entry, &mut storage)?;
            entries.push(Entry { name: name.to_owned(), path: paths.take(name), kind });
        }
        let mut notes = paths.notes();
        if !storage.items.is_empty() {
            notes.push(format!("{} items in its files belong to no listed tensor", storage.items.len()));
        }
        let version = graph.field(root, "version").and_then(|id| graph.str(id)).map(str::to_owned);
        Ok(Metadata { version, files: storage.files, entries, notes })
    }
}

fn read_kind<'a>(
    graph: &'a Graph,
    name: &'a str,
    id: NodeId,
    storage: &mut Storage<'a>,
) -> Result<Kind, DcpFault> {
    let place = || format!("the entry of `{name}`");
    let object = graph.object(id).ok_or_else(|| unexpected(place(), "a tensor or value"))?;
    if object.class.is(METADATA, "BytesStorageMetadata") {
        return Ok(Kind::Value(storage.take(name, None)?));
    }
    if !object.class.is(METADATA, "TensorStorageMetadata") {
        return Err(unexpected(place(), "a tensor or value"));
    }
    let dtype = read_dtype(graph, name, id)?;
    let shape = graph.field(id, "size").and_then(|size| graph.dims(size));
    let shape = shape.ok_or_else(|| unexpected(place(), "a tensor with a size"))?;
    if len_bytes(&shape, dtype).is_none() {
        return Err(DcpFault::TooLarge { tensor: name.to_owned(), shape });
    }
    let listed = graph.field(id, "chunks").and_then(|chunks| graph.items(chunks));
    let listed = listed.ok_or_else(|| unexpected(place(), "a tensor with a list of chunks"))?;
    let mut chunks = Vec::with_capacity(listed.len());
    for &chunk in listed {
        let dims = |field| graph.field(chunk, field).and_then(|dims| graph.dims(dims));
        let (Some(offsets), Some(sizes)) = (dims("offsets"), dims("sizes")) else {
            return Err(unexpected(place(), "a tensor whose chunks have offsets and sizes"));
        };
        if !is_inside(&offsets, &sizes, &shape) {
            let tensor = name.to_owned();
            return Err(DcpFault::ChunkOutsideTensor { tensor, shape, offsets, sizes });
        }
        let location = storage.take(name, Some(&offsets))?;
        chunks.push(ChunkEntry { offsets, sizes, location });
    }
    Ok(Kind::Tensor { dtype, shape, chunks })
}

fn read_dtype(graph: &Graph, name: &str, id: NodeId) -> Result<TensorType, DcpFault> {
    let bad = || unexpected(format!("the entry of `{name}`"), "a tensor with five or six properties");
    let properties = graph.field(id, "properties").and_then(|id| graph.object(id)).ok_or_else(bad)?;
    let parts = properties.state.and_then(|state| graph.items(state)).ok_or_else(bad)?;
    let ([found, layout, _, _, _] | [found, layout, _, _, _, _]) = parts else { return Err(bad()) };
    let layout = graph.object(*layout).and_then(|layout| layout.args.first());
    if layout.and_then(|&layout| graph.str(layout)) != Some("torch.strided") {
        return Err(unexpected(format!("the layout of `{name}`"), "torch.strided"));
    }
    let Node::Global(found) = graph[*found] else { return Err(bad()) };
    let unknown = || DcpFault::UnknownDtype { tensor: name.to_owned(), dtype: found.path() };
    dtype(found).ok_or_else(unknown)
}

fn len_bytes(shape: &[u64], dtype: TensorType) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    let len = shape.iter().try_fold(dtype.size_bytes() as u64, |len, &dim| len.checked_mul(dim))?;
    (len <= i64::MAX as u64).then_some(len)
}

fn is_inside(offsets: &[u64], sizes: &[u64], shape: &[u64]) -> bool {
    let fits = |((offset, size), dim): ((&u64, &u64), &u64)| {
        offset.checked_add(*size).is_some_and(|end| end <= *dim)
    };
    offsets.len() == shape.len()
        && sizes.len() == shape.len()
        && offsets.iter().zip(sizes).zip(shape).all(fits)
}

/// Names with their places, as the planner of the save left them.
struct Paths<'a> {
    graph: &'a Graph,
    by_name: HashMap<&'a str, NodeId>,
    flat_count: usize,
}

impl<'a> Paths<'a> {
    fn read(graph: &'a Graph, root: NodeId) -> Paths<'a> {
        let pairs = graph.field(root, "planner_data").and_then(|id| graph.pairs(id)).unwrap_or_default();
        let by_name = pairs.iter().filter_map(|&(name, path)| Some((graph.str(name)?, path))).collect();
        Paths { graph, by_name, flat_count: 0 }
    }

    /// The path of a name; the name itself as the only step where nothing better is known.
    fn take(&mut self, name: &str) -> Vec<Key> {
        let path = self.by_name.remove(name).and_then(|path| self.path(path));
        path.filter(|path| join(path) == name).unwrap_or_else(|| {
            self.flat_count += 1;
            vec![Key::Name(name.to_owned())]
        })
    }

    fn path(&self, id: NodeId) -> Option<Vec<Key>> {
        let key = |&step: &NodeId| match &self.graph[step] {
            Node::Str(name) => Some(Key::Name(name.to_string())),
            Node::Int(index) => u64::try_from(*index).ok().map(Key::Index),
            _ => None,
        };
        self.graph.items(id)?.iter().map(key).collect()
    }

    fn notes(&self) -> Vec<String> {
        match self.flat_count {
            0 => Vec::new(),
            count => {
                vec![format!("{count} names have no known place in a nested state dict and are kept flat")]
            }
        }
    }
}

/// Where each item lies, by name and first index of its chunk.
struct Storage<'a> {
    items: HashMap<(&'a str, Option<Vec<u64>>), Location>,
    files: Vec<String>,
}

impl<'a> Storage<'a> {
    fn read(graph: &'a Graph, root: NodeId) -> Result<Storage<'a>, DcpFault> {
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

    fn take(&mut self, name: &'a str, offset: Option<&[u64]>) -> Result<Location, DcpFault> {
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
