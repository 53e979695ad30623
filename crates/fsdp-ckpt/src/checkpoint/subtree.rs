//! Extracts the part of a checkpoint under one key: files that wrap a state hold it under a key such as `model`.

use std::collections::BTreeSet;

use super::{Checkpoint, Key, Tensor, join};
use crate::error::{Error, listed};

/// Maximum number of names in a message.
const LISTED_MAX: usize = 8;

/// How a checkpoint represents the content under a key: formats without nesting have names with dots instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subtree {
    /// The key is a sequence of whole path steps.
    Steps,
    /// The key is a prefix of names.
    Names,
}

impl Subtree {
    fn of(checkpoint: &Checkpoint, key: &str) -> Subtree {
        let mut tensors = checkpoint.tensors.values();
        match tensors.any(|tensor| Subtree::Steps.after(&tensor.path, key).is_some()) {
            true => Subtree::Steps,
            false => Subtree::Names,
        }
    }

    /// Returns the rest of a path after a key, which may be several steps joined by dots.
    fn after(self, path: &[Key], key: &str) -> Option<Vec<Key>> {
        match self {
            Subtree::Steps => {
                (1..path.len()).find(|&len| join(&path[..len]) == key).map(|len| path[len..].to_vec())
            }
            Subtree::Names => {
                let (Key::Name(first), rest) = path.split_first()? else { return None };
                let name = first.strip_prefix(key)?.strip_prefix('.')?;
                Some([&[Key::Name(name.to_owned())], rest].concat())
            }
        }
    }
}

impl Checkpoint {
    /// Returns the content under a key, with the key removed from names.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if no tensor is under it.
    pub fn under(mut self, key: &str) -> Result<Checkpoint, Error> {
        let keys = self.keys();
        let under = Subtree::of(&self, key);
        let rest = |path: &[Key]| under.after(path, key);
        let others = self.tensors.iter().filter(|(_, tensor)| rest(&tensor.path).is_none());
        let others: Vec<String> = others.map(|(name, _)| format!("`{name}`")).collect();
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
            let reason = format!("no tensor is under the key `{key}`; keys with tensors are {keys}");
            return Err(Error::bad_request(&self.path, reason));
        }
        if !others.is_empty() {
            let (count, names) = (others.len(), listed(&others, LISTED_MAX));
            self.notes.push(format!("tensors that are not under `{key}` are left out, {count}: {names}"));
        }
        self.assign_roles();
        Ok(self)
    }

    /// Returns the key under which this checkpoint has exactly the tensors of another one. `None` if there is no such
    /// key.
    pub fn key_of_all(&self, other: &Checkpoint) -> Option<String> {
        let names: BTreeSet<&String> = other.tensors.keys().collect();
        let holds_all = |key: &String| {
            let under = Subtree::of(self, key);
            let after = |tensor: &Tensor| under.after(&tensor.path, key);
            let found = self.tensors.values().filter_map(after).map(|path| join(&path));
            found.collect::<BTreeSet<String>>().iter().eq(names.iter().copied())
        };
        if names.is_empty() {
            return None;
        }
        self.keys().into_iter().find(holds_all)
    }

    /// The first components of tensor names, up to the first dot.
    fn keys(&self) -> BTreeSet<String> {
        self.tensors.keys().filter_map(|name| Some(name.split_once('.')?.0.to_owned())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{checkpoint::Role, safetensors::TensorType};

    fn of(paths: &[&[&str]]) -> Checkpoint {
        let tensor = |steps: &&[&str]| {
            let path: Vec<Key> = steps.iter().map(|step| Key::Name((*step).to_owned())).collect();
            let tensor =
                Tensor { path, role: Role::Model, dtype: TensorType::F32, shape: vec![], chunks: vec![] };
            (join(&tensor.path), tensor)
        };
        Checkpoint { tensors: paths.iter().map(tensor).collect(), ..Checkpoint::default() }
    }

    fn names(checkpoint: &Checkpoint) -> Vec<&str> {
        checkpoint.tensors.keys().map(String::as_str).collect()
    }

    #[test]
    fn key_matches_entire_steps_of_nested_names() {
        let wrapped = of(&[&["model", "a.w"], &["model.b"], &["optim", "a.w"]]).under("model").unwrap();
        assert_eq!(names(&wrapped), ["a.w"]);
        let others = "tensors that are not under `model` are left out, 2: `model.b`, `optim.a.w`";
        assert_eq!(wrapped.notes, [others]);
        assert_eq!(names(&of(&[&["state", "model", "w"]]).under("state.model").unwrap()), ["w"]);
    }

    #[test]
    fn key_matches_dotted_prefix_of_flat_names() {
        let flat = of(&[&["model.a.w"], &["lm_head.w"], &["modeling.w"]]).under("model").unwrap();
        assert_eq!(names(&flat), ["a.w"]);
        assert!(flat.notes[0].contains("`lm_head.w`, `modeling.w`"), "{:?}", flat.notes);
        assert!(of(&[&["a.w"]]).under("model").is_err());
    }
}
