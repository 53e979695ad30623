//! Joins several checkpoints into one: files that belong together but are read separately.

use std::path::Path;

use super::{Checkpoint, Key, Role, join};
use crate::error::Error;

impl Checkpoint {
    /// Adds the content of another checkpoint below `prefix`, with another role if one is given.
    ///
    /// # Errors
    /// [`Error::Malformed`] if both have a tensor or value of the same name.
    pub(crate) fn join(&mut self, part: Checkpoint, prefix: &[Key], role: Option<Role>) -> Result<(), Error> {
        let base = self.sources.len();
        let renamed = |path: &[Key]| [prefix, path].concat();
        for (_, mut tensor) in part.tensors {
            tensor.path = renamed(&tensor.path);
            tensor.role = role.unwrap_or(tensor.role);
            tensor.chunks.iter_mut().for_each(|chunk| chunk.source += base);
            let name = join(&tensor.path);
            if let Some(first) = self.tensors.insert(name.clone(), tensor) {
                let first =
                    first.chunks.first().map_or(&*self.path, |chunk| self.sources[chunk.source].path());
                return Err(twice(&name, first, &part.path));
            }
        }
        for (_, mut object) in part.values {
            object.path = renamed(&object.path);
            object.role = role.unwrap_or(object.role);
            let name = join(&object.path);
            if self.values.insert(name.clone(), object).is_some() {
                return Err(twice(&name, &self.path, &part.path));
            }
        }
        let prefix = if prefix.is_empty() { String::new() } else { format!("{}.", join(prefix)) };
        self.opaque.extend(part.opaque.into_iter().map(|(name, class)| (format!("{prefix}{name}"), class)));
        self.protections.extend(part.protections.into_iter().map(|mut protection| {
            protection.source += base;
            protection
        }));
        self.sources.extend(part.sources);
        self.run_state.extend(part.run_state);
        self.notes.extend(part.notes);
        self.limits.extend(part.limits);
        Ok(())
    }
}

fn twice(name: &str, first: &Path, second: &Path) -> Error {
    let first = first.display();
    Error::malformed(second, format!("it holds `{name}`, as does {first}; remove one of the two"))
}
