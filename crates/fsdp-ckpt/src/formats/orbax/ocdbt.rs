//! OCDBT, the key-value store of TensorStore: a B-tree of keys, whose values are in its leaves or in other files.
//!
//! ```text
//! manifest.ocdbt             the place of the root node of the newest version
//! d/0123..cdef               nodes, and values that are too long for a leaf
//! ocdbt.process_0/d/..       the same, of one process; the root's tree refers to them after the processes were merged
//! ```
//!
//! The height of a node is one less than that of its parent, so there are no cycles. A node may have several parents,
//! which a hostile file could use to repeat it: the numbers of nodes, keys and bytes are limited.

mod input;
mod node;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    path::Path,
    sync::Arc,
};

use crate::{
    checkpoint::{Protection, Source},
    error::{Error, Fault},
    file_io::{Files, PathFile},
};
use input::{Input, NODE_BYTES_MAX};
use node::{Location, Value, children, leaf, newest};

/// The file that leads to the tree.
pub(super) const MANIFEST: &str = "manifest.ocdbt";

const MANIFEST_MAGIC: u32 = 0x0cdb_3a2a;
const NODE_MAGIC: u32 = 0x0cdb_20de;

/// Maximum number of keys.
const KEYS_MAX: u64 = 1 << 22;

/// Maximum number of nodes on all paths through the tree. They usually have megabytes.
const NODES_MAX: u64 = 1 << 16;

/// Maximum number of bytes of all decoded nodes, and of all keys and values that are kept.
const BYTES_MAX: u64 = 1 << 30;

/// Where a value is.
#[derive(Clone, Debug)]
pub(super) enum Stored {
    /// In the metadata of this file.
    Inline(Arc<Path>, Arc<[u8]>),
    /// In a file, of which it is a range.
    InFile(Arc<Path>, Range<u64>),
}

/// All keys of a store, and the files with nodes and their checksums.
#[derive(Debug, Default)]
pub(super) struct Tree {
    pub(super) values: BTreeMap<String, Stored>,
    pub(super) sources: Vec<Source>,
    pub(super) protections: Vec<Protection>,
    files: BTreeMap<String, (Arc<Path>, u64)>,
    source_of: BTreeMap<Arc<Path>, usize>,
    protected: BTreeSet<(usize, u64, u64)>,
    nodes: u64,
    decoded_bytes: u64,
    kept_bytes: u64,
}

impl Tree {
    /// Reads the newest version of the store in a directory.
    pub(super) fn read(dir: &Path) -> Result<Tree, Error> {
        let path = dir.join(MANIFEST);
        let in_manifest = |fault: Fault| fault.in_file(&path);
        let text = Files::anywhere().read_small(&path, NODE_BYTES_MAX)?;
        let too_long = || Fault::unsupported(format!("it has more than {NODE_BYTES_MAX} bytes"));
        let text = text.ok_or_else(too_long).map_err(in_manifest)?;
        let body = input::body(&text, MANIFEST_MAGIC).map_err(in_manifest)?;
        let (root, height, keys) = newest(&body).map_err(in_manifest)?;
        let mut tree = Tree::default();
        tree.protect(&path.clone().into(), text.len() as u64, 0..text.len() as u64, &text);
        tree.add_node(dir, &root, height, "")?;
        if tree.values.len() as u64 != keys {
            let got = tree.values.len();
            let reason = format!("it states {keys} keys, but its tree has {got}; fetch or save it again");
            return Err(Error::malformed(path, reason));
        }
        Ok(tree)
    }

    /// Notes that a checksum at its end protects a range of a file.
    fn protect(&mut self, path: &Arc<Path>, len: u64, range: Range<u64>, encoded: &[u8]) {
        let next = self.sources.len();
        let source = *self.source_of.entry(path.clone()).or_insert(next);
        if source == next {
            self.sources.push(Source::File { path: path.to_path_buf(), len });
        }
        let range = range.start..range.end - 4;
        if self.protected.insert((source, range.start, range.end)) {
            let (digest, what) = (input::digest(encoded), "metadata of the store".to_owned());
            self.protections.push(Protection { source, range, digest, what });
        }
    }

    /// The path of a data file, and its length, which is at least `end`.
    fn file(&mut self, dir: &Path, name: &str, end: u64) -> Result<(Arc<Path>, u64), Error> {
        if !self.files.contains_key(name) {
            let path = dir.join(name);
            let (_, len) = PathFile::open(&path)?;
            self.files.insert(name.to_owned(), (path.into(), len));
        }
        let (path, len) = &self.files[name];
        if end > *len {
            let reason =
                format!("it has {len} bytes, but the store has a value that ends at {end}; fetch it again");
            return Err(Error::malformed(&**path, reason));
        }
        Ok((path.clone(), *len))
    }

    /// Reads a node, and checks its checksum and height.
    fn read_node(&mut self, dir: &Path, at: &Location, height: u8) -> Result<Node, Error> {
        let (path, len) = self.file(dir, &at.file.path, at.range.end)?;
        let node = format!("the node in its bytes {}..{}: ", at.range.start, at.range.end);
        let node = Node { path: path.clone(), what: node, body: Vec::new() };
        let encoded_len = at.range.end - at.range.start;
        self.nodes += 1;
        if encoded_len > NODE_BYTES_MAX || self.nodes > NODES_MAX {
            return Err(node.error(too_much()));
        }
        let mut encoded = vec![0; encoded_len as usize];
        PathFile::open(&path)?.0.read_exact_at(&mut encoded, at.range.start)?;
        let body = input::body(&encoded, NODE_MAGIC).map_err(|fault| node.error(fault))?;
        self.decoded_bytes += body.len() as u64;
        if self.decoded_bytes > BYTES_MAX {
            return Err(node.error(too_much()));
        }
        self.protect(&path, len, at.range.clone(), &encoded);
        match body.first() {
            Some(&found) if found == height => Ok(Node { body, ..node }),
            found => {
                let reason =
                    format!("its height is {found:?}, but what refers to it says {height}; save it again");
                Err(node.error(Fault::new(reason)))
            }
        }
    }

    /// Adds the values below a node, whose keys all begin with `prefix`.
    fn add_node(&mut self, dir: &Path, at: &Location, height: u8, prefix: &str) -> Result<(), Error> {
        let node = self.read_node(dir, at, height)?;
        let entries = Input { bytes: &node.body[1..] };
        if height > 0 {
            for (child, common) in children(entries, &at.file.base).map_err(|fault| node.error(fault))? {
                self.add_node(dir, &child, height - 1, &format!("{prefix}{common}"))?;
            }
            return Ok(());
        }
        for (key, value) in leaf(entries, &at.file.base).map_err(|fault| node.error(fault))? {
            let key = format!("{prefix}{key}");
            self.kept_bytes += key.len() as u64;
            let stored = match value {
                Value::Here(bytes) => {
                    self.kept_bytes += bytes.len() as u64;
                    Stored::Inline(node.path.clone(), bytes)
                }
                Value::At(Location { file, range }) => {
                    Stored::InFile(self.file(dir, &file.path, range.end)?.0, range)
                }
            };
            if self.values.len() as u64 == KEYS_MAX || self.kept_bytes > BYTES_MAX {
                return Err(node.error(too_much()));
            }
            if self.values.insert(key.clone(), stored).is_some() {
                return Err(
                    node.error(Fault::new(format!("the key `{key}` is in the tree twice; save it again")))
                );
            }
        }
        Ok(())
    }
}

/// Whether bytes are the decoded body of a manifest or node, for fuzzing.
pub(super) fn parse(body: &[u8]) -> bool {
    let entries = || Input { bytes: body.get(1..).unwrap_or_default() };
    newest(body).is_ok() || leaf(entries(), "").is_ok() || children(entries(), "").is_ok()
}

/// A node that was read.
struct Node {
    path: Arc<Path>,
    what: String,
    body: Vec<u8>,
}

impl Node {
    fn error(&self, fault: Fault) -> Error {
        fault.of_part(&self.what, 0).in_file(&*self.path)
    }
}

fn too_much() -> Fault {
    Fault::unsupported(format!(
        "the tree has more than {KEYS_MAX} keys, {NODES_MAX} nodes or {BYTES_MAX} bytes of them"
    ))
}
