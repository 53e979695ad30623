//! The contents of `.metadata`, checked for consistency: names, shapes, boxes, and the location of each item.
//!
//! The classes are PyTorch's. Their states differ by version: tensor properties are a tuple of five parts, or six since
//! torch 2.15; torch 2.1 and 2.2 keep them in another module; some fields were added later. The version in the metadata
//! does not distinguish these, so the reader goes by the fields it finds.

use std::collections::{HashMap, HashSet};

use super::storage::{Location, Storage};
use crate::{
    checkpoint::{Global, Key, is_box_inside, join, len_bytes},
    error::Fault,
    pickle::{Graph, Node, NodeId},
    safetensors::TensorType,
    torch::dtype,
};

/// The name of a tool whose metadata has a distinctive field.
const MEGATRON: &str = "Megatron Core";

/// The words of the note about names whose places in a nested state dict were not recorded.
pub(in crate::formats) const FLAT_NAMES: &str =
    "names have no known place in a nested state dict and are kept flat";

const METADATA: &str = "torch.distributed.checkpoint.metadata";

/// The metadata of a checkpoint.
#[derive(Debug, Default)]
pub(super) struct Metadata {
    pub(super) version: Option<String>,
    /// Names of the files, all without directories.
    pub(super) files: Vec<String>,
    pub(super) entries: Vec<Entry>,
    pub(super) notes: Vec<String>,
}

/// A tensor or value that the metadata lists.
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

/// A chunk of a tensor: a box inside of it.
#[derive(Debug)]
pub(super) struct ChunkEntry {
    pub(super) offsets: Vec<u64>,
    pub(super) sizes: Vec<u64>,
    pub(super) location: Location,
}

/// The error for a part of the metadata that PyTorch does not write this way.
pub(super) fn unexpected(place: impl AsRef<str>, expected: &str) -> Fault {
    Fault::new(format!("{} is not {expected}; save the checkpoint again", place.as_ref()))
}

/// The tool whose directories look like PyTorch's, recognized by the module of a class in its metadata.
pub(super) fn other_tool(unknown: &Global) -> Option<&'static str> {
    match unknown.module.split('.').next() {
        Some("megatron") => Some(MEGATRON),
        Some("bytecheckpoint") => Some("ByteCheckpoint"),
        _ => None,
    }
}

/// The error for a checkpoint of another tool that resembles PyTorch's.
pub(super) fn of_other_tool(tool: &str) -> Fault {
    let looks = "which only resembles one of PyTorch";
    Fault::unsupported(format!("it is a checkpoint of {tool}, {looks}; convert it with {tool} first"))
}

impl Metadata {
    pub(super) fn read(graph: &Graph) -> Result<Metadata, Fault> {
        let root = graph.root();
        if !graph.object(root).is_some_and(|object| object.class.is(METADATA, "Metadata")) {
            return Err(unexpected("its root", "the metadata of a distributed checkpoint"));
        }
        if graph.field(root, "mcore_data").is_some() {
            return Err(of_other_tool(MEGATRON));
        }
        let mut storage = Storage::read(graph, root)?;
        let mut paths = Paths::read(graph, root);
        let listed = graph.field(root, "state_dict_metadata").and_then(|id| graph.pairs(id));
        let listed = listed.ok_or_else(|| unexpected("its list of tensors", "a dict"))?;
        let mut entries = Vec::with_capacity(listed.len());
        for &(name, entry) in listed {
            let name = graph.str(name).ok_or_else(|| unexpected("the name of a tensor", "a text"))?;
            let kind = read_kind(graph, name, entry, &mut storage)?;
            entries.push(Entry { name: name.to_owned(), path: paths.take(name)?, kind });
        }
        let mut notes = paths.notes();
        if !storage.items.is_empty() {
            notes.push(format!("{} items in its files belong to no listed tensor", storage.items.len()));
        }
        let version = graph.field(root, "version").and_then(|id| graph.str(id)).map(str::to_owned);
        Ok(Metadata { version, files: storage.files, entries, notes })
    }

    /// Adds the entries of another rank. If both list a chunk or value, the existing entry is kept.
    pub(super) fn merge(&mut self, other: Metadata) -> Result<(), Fault> {
        self.version = self.version.take().or(other.version);
        for note in other.notes {
            if !self.notes.contains(&note) {
                self.notes.push(note);
            }
        }
        let mut file_places = Vec::with_capacity(other.files.len());
        for file in other.files {
            let known = self.files.iter().position(|known| *known == file);
            file_places.push(known.unwrap_or(self.files.len()));
            if known.is_none() {
                self.files.push(file);
            }
        }
        let names = self.entries.iter().enumerate().map(|(place, entry)| (entry.name.clone(), place));
        let places: HashMap<String, usize> = names.collect();
        for mut entry in other.entries {
            entry.kind.move_files(&file_places);
            match places.get(&entry.name) {
                None => self.entries.push(entry),
                Some(&place) => self.entries[place].add_chunks(entry)?,
            }
        }
        Ok(())
    }
}

impl Kind {
    /// Replaces each file index `i` by `places[i]`.
    fn move_files(&mut self, places: &[usize]) {
        let locations: Vec<&mut Location> = match self {
            Kind::Value(location) => vec![location],
            Kind::Tensor { chunks, .. } => chunks.iter_mut().map(|chunk| &mut chunk.location).collect(),
        };
        locations.into_iter().for_each(|location| location.file = places[location.file]);
    }
}

impl Entry {
    /// Adds the chunks of another rank's entry that are not listed yet.
    fn add_chunks(&mut self, other: Entry) -> Result<(), Fault> {
        match (&mut self.kind, other.kind) {
            (Kind::Value(_), Kind::Value(_)) => Ok(()),
            (
                Kind::Tensor { dtype, shape, chunks },
                Kind::Tensor { dtype: other_dtype, shape: other_shape, chunks: more },
            ) if *dtype == other_dtype && *shape == other_shape => {
                let known: HashSet<Vec<u64>> = chunks.iter().map(|chunk| chunk.offsets.clone()).collect();
                chunks.extend(more.into_iter().filter(|chunk| !known.contains(&chunk.offsets)));
                Ok(())
            }
            _ => {
                let differs = "has another type or shape here than in the metadata of a lower rank";
                Err(Fault::new(format!("`{}` {differs}; files were mixed", other.name)))
            }
        }
    }
}

fn read_kind<'a>(
    graph: &'a Graph,
    name: &'a str,
    id: NodeId,
    storage: &mut Storage<'a>,
) -> Result<Kind, Fault> {
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
    if len_bytes(&shape, dtype.size_bytes()).is_none() {
        let reason = format!("tensor `{name}` of shape {shape:?} has more bytes than can be counted");
        return Err(Fault::new(reason));
    }
    let listed = graph.field(id, "chunks").and_then(|chunks| graph.items(chunks));
    let listed = listed.ok_or_else(|| unexpected(place(), "a tensor with a list of chunks"))?;
    let mut chunks = Vec::with_capacity(listed.len());
    for &chunk in listed {
        let dims = |field| graph.field(chunk, field).and_then(|dims| graph.dims(dims));
        let (Some(offsets), Some(sizes)) = (dims("offsets"), dims("sizes")) else {
            return Err(unexpected(place(), "a tensor whose chunks have offsets and sizes"));
        };
        if !is_box_inside(&offsets, &sizes, &shape) {
            let chunk = format!("a chunk at {offsets:?} of size {sizes:?}, which is outside of it");
            return Err(Fault::new(format!("tensor `{name}` of shape {shape:?} has {chunk}")));
        }
        let location = storage.take(name, Some(&offsets))?;
        chunks.push(ChunkEntry { offsets, sizes, location });
    }
    Ok(Kind::Tensor { dtype, shape, chunks })
}

fn read_dtype(graph: &Graph, name: &str, id: NodeId) -> Result<TensorType, Fault> {
    let bad = || unexpected(format!("the entry of `{name}`"), "a tensor with five or six properties");
    let properties = graph.field(id, "properties").and_then(|id| graph.object(id)).ok_or_else(bad)?;
    let parts = properties.state.and_then(|state| graph.items(state)).ok_or_else(bad)?;
    let ([found, layout, _, _, _] | [found, layout, _, _, _, _]) = parts else { return Err(bad()) };
    let layout = graph.object(*layout).and_then(|layout| graph.args(layout).first());
    if layout.and_then(|&layout| graph.str(layout)) != Some("torch.strided") {
        return Err(unexpected(format!("the layout of `{name}`"), "torch.strided"));
    }
    let Node::Global(found) = graph[*found] else { return Err(bad()) };
    let unknown = || format!("tensor `{name}` has the dtype {}, which is not supported", found.path());
    dtype(found).ok_or_else(|| Fault::unsupported(unknown()))
}

/// The paths of names in the nested state dict, as recorded by the save planner.
struct Paths<'a> {
    graph: &'a Graph,
    by_name: HashMap<&'a str, NodeId>,
    /// Whether the planner recorded paths; if so, it must have recorded one for every name.
    are_known: bool,
    flat_count: usize,
}

impl<'a> Paths<'a> {
    fn read(graph: &'a Graph, root: NodeId) -> Paths<'a> {
        let pairs = graph.field(root, "planner_data").and_then(|id| graph.pairs(id)).unwrap_or_default();
        let by_name = pairs.iter().filter_map(|&(name, path)| Some((graph.str(name)?, path))).collect();
        Paths { graph, by_name, are_known: !pairs.is_empty(), flat_count: 0 }
    }

    /// The path of a name; the name as the only step if the planner recorded no paths.
    fn take(&mut self, name: &str) -> Result<Vec<Key>, Fault> {
        if !self.are_known {
            self.flat_count += 1;
            return Ok(vec![Key::Name(name.to_owned())]);
        }
        let path = self.by_name.remove(name).and_then(|path| self.path(path));
        let place = || format!("the place of `{name}` in its planner_data");
        path.filter(|path| join(path) == name).ok_or_else(|| unexpected(place(), "the path of this name"))
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
                vec![format!("{count} {FLAT_NAMES}")]
            }
        }
    }
}
