//! What is under one key of a checkpoint: files that wrap a state hold it under a key such as `model`.

use std::collections::BTreeSet;

use super::{Checkpoint, Key, join};
use crate::error::{Error, listed};

/// Names that a message lists.
const LISTED_MAX: usize = 8;

/// The rest of a path behind a key, which may be several steps joined by dots, or the beginning of a name with dots in it.
fn behind(path: &[Key], key: &str) -> Option<Vec<Key>> {
    if let Some(len) = (1..path.len()).find(|&len| join(&path[..len]) == key) {
        return Some(path[len..].to_vec());
    }
    let (Key::Name(first), rest) = path.split_first()? else { return None };
    let name = first.strip_prefix(key)?.strip_prefix('.')?;
    Some([&[Key::Name(name.to_owned())], rest].concat())
}

impl Checkpoint {
    /// What is under a key, with names that begin behind it.
    ///
    /// # Errors
    /// [`Error::BadRequest`] when no tensor is under it.
    pub fn under(mut self, key: &str) -> Result<Checkpoint, Error> {
        let keys = self.keys();
        let rest = |path: &[Key]| behind(path, key);
        let tensors = std::mem::take(&mut self.tensors).into_values();
        self.tensors = tensors
            .filter_map(|mut tensor| {
                tensor.path = rest(&tensor.path)?;
                Some((join(&tensor.path), tensor))
            })
            .collect();
        let values = std::mem::take(&mut self.values).into_values();
        self.values = values
            .filter_map(|mut object| {
                object.path = rest(&object.path)?;
                Some((join(&object.path), object))
            })
            .collect();
        let prefix = format!("{key}.");
        let opaque = std::mem::take(&mut self.opaque).into_iter();
        self.opaque = opaque
            .filter_map(|(name, class)| Some((name.strip_prefix(&prefix)?.to_owned(), class)))
            .collect();
        if self.tensors.is_empty() {
            let keys = listed(&keys.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>(), LISTED_MAX);
            let reason = format!("no tensor is under the key `{key}`; keys that hold some are {keys}");
            return Err(Error::bad_request(&self.path, reason));
        }
        self.assign_roles();
        Ok(self)
    }

    /// The key under which this checkpoint has exactly the tensors that another one has; none if there is no such key.
    pub fn key_of_all(&self, other: &Checkpoint) -> Option<String> {
        let names: BTreeSet<&String> = other.tensors.keys().collect();
        let holds_all = |key: &String| {
            let found =
                self.tensors.values().filter_map(|tensor| behind(&tensor.path, key)).map(|path| join(&path));
            found.collect::<BTreeSet<String>>().iter().eq(names.iter().copied())
        };
        if names.is_empty() {
            return None;
        }
        self.keys().into_iter().find(holds_all)
    }

    /// What names of tensors begin with, up to the first dot.
    fn keys(&self) -> BTreeSet<String> {
        self.tensors.keys().filter_map(|name| Some(name.split_once('.')?.0.to_owned())).collect()
    }
}
