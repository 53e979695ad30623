//! The leaves of an item, as its `_METADATA` lists them, and those that are texts.

use std::{collections::BTreeMap, path::Path};

use serde::Deserialize;

use super::{read_small, store::Store};
use crate::{
    checkpoint::{Key, Value, join},
    error::{Error, Fault},
    unique_map::UniqueMap,
};

/// Maximum length of a file of metadata.
pub(super) const METADATA_BYTES_MAX: u64 = 1 << 28;

/// The file with the leaves that are texts, by name.
const TEXTS_FILE: &str = "_strings.json";

/// What a leaf is.
#[derive(Debug, PartialEq)]
pub(super) enum Kind {
    Array,
    Text,
    /// Nothing, or an empty container.
    Value(Value),
}

/// A leaf of the tree.
#[derive(Debug, PartialEq)]
pub(super) struct Leaf {
    pub(super) path: Vec<Key>,
    pub(super) kind: Kind,
}

/// The tree.
#[derive(Debug, PartialEq)]
pub(super) struct TreeMetadata {
    pub(super) leaves: Vec<Leaf>,
    /// Whether arrays are in an OCDBT store, if it is said.
    pub(super) is_ocdbt: Option<bool>,
    pub(super) is_zarr3: bool,
    /// Whether all chunks are stored; older versions leave out those of zeros.
    pub(super) has_all_chunks: bool,
}

#[derive(Deserialize)]
struct File {
    tree_metadata: UniqueMap<Entry>,
    use_ocdbt: Option<bool>,
    #[serde(default)]
    use_zarr3: bool,
    #[serde(default)]
    store_array_data_equal_to_fill_value: bool,
}

#[derive(Deserialize)]
struct Entry {
    key_metadata: Vec<Step>,
    value_metadata: ValueMetadata,
}

#[derive(Deserialize)]
struct Step {
    key: String,
    /// 1 for an index of a sequence, 2 for a key of a dict or a field.
    key_type: u8,
}

#[derive(Deserialize)]
struct ValueMetadata {
    value_type: String,
    #[serde(default)]
    skip_deserialize: bool,
}

impl TreeMetadata {
    pub(super) fn parse(text: &[u8]) -> Result<TreeMetadata, Fault> {
        let file: File = serde_json::from_slice(text)
            .map_err(|error| Fault::new(format!("it cannot be read: {error}; fetch or save it again")))?;
        let leaves = file.tree_metadata.0.into_iter().map(|(name, entry)| {
            let path = entry.key_metadata.into_iter().map(Step::into_key).collect::<Result<Vec<_>, _>>()?;
            let ValueMetadata { value_type, skip_deserialize } = entry.value_metadata;
            let kind = match (&value_type[..], skip_deserialize) {
                ("None", _) => Kind::Value(Value::None),
                ("Dict" | "NamedTuple" | "Mapping", true) => Kind::Value(Value::Dict(Vec::new())),
                ("List", true) => Kind::Value(Value::List(Vec::new())),
                ("Tuple", true) => Kind::Value(Value::Tuple(Vec::new())),
                ("string", false) => Kind::Text,
                ("jax.Array" | "np.ndarray" | "scalar" | "jax.random.key", false) => Kind::Array,
                _ => {
                    let reason = format!(
                        "{name} is a `{value_type}`, which is not read; known are arrays, numbers and texts"
                    );
                    return Err(Fault::unsupported(reason));
                }
            };
            match join(&path).is_empty() {
                true => Err(Fault::unsupported("it is one leaf without a name; save it in a dict")),
                false => Ok(Leaf { path, kind }),
            }
        });
        let leaves = leaves.collect::<Result<Vec<_>, _>>()?;
        Ok(TreeMetadata {
            leaves,
            is_ocdbt: file.use_ocdbt,
            is_zarr3: file.use_zarr3,
            has_all_chunks: file.store_array_data_equal_to_fill_value,
        })
    }
}

impl Step {
    fn into_key(self) -> Result<Key, Fault> {
        match (self.key_type, self.key.parse()) {
            (1, Ok(index)) => Ok(Key::Index(index)),
            (2, _) => Ok(Key::Name(self.key)),
            (kind, _) => Err(Fault::new(format!("its key `{}` cannot be of the type {kind}", self.key))),
        }
    }
}

/// The leaves that are texts.
#[derive(Debug, Default)]
pub(super) struct Texts(BTreeMap<String, String>);

impl Texts {
    pub(super) fn read(dir: &Path, store: &mut Store) -> Result<Texts, Error> {
        let path = dir.join(TEXTS_FILE);
        let text = read_small(&path)?;
        store.plain_source(&path.clone().into())?;
        let pairs: UniqueMap<String> = serde_json::from_slice(&text).map_err(|error| {
            Error::malformed(&path, format!("it cannot be read: {error}; fetch it again"))
        })?;
        Ok(Texts(pairs.0.into_iter().collect()))
    }

    pub(super) fn get(&self, name: &str) -> Result<Value, Fault> {
        let text = self.0.get(name).cloned();
        text.map(Value::Str)
            .ok_or_else(|| Fault::new(format!("the text `{name}` is not in {TEXTS_FILE}; fetch it again")))
    }
}
