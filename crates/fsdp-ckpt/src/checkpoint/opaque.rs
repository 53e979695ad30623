//! Opaque parts of a checkpoint: objects of classes that are no part of a checkpoint format.

use super::{Checkpoint, Key, join};
use crate::error::{Error, listed};

/// Maximum number of names in a message.
const LISTED_MAX: usize = 8;

impl Checkpoint {
    /// Whether a path leads into an opaque object.
    pub(super) fn is_in_opaque(&self, path: &[Key]) -> bool {
        !self.opaque.is_empty() && (0..path.len()).any(|len| self.opaque.contains_key(&join(&path[..len])))
    }

    /// Describes the opaque objects and their classes, for messages.
    pub fn opaque_texts(&self) -> Vec<String> {
        self.opaque.iter().map(|(name, class)| format!("`{name}` ({class})")).collect()
    }

    /// Refuses a checkpoint that contains opaque objects.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with the names and classes of these objects.
    pub fn refuse_opaque(&self) -> Result<(), Error> {
        if self.opaque.is_empty() {
            return Ok(());
        }
        let reason = format!(
            "it holds objects of classes that belong to no checkpoint format: {}; none of them was run or \
             read; without --strict they are left out and everything else is read",
            listed(&self.opaque_texts(), LISTED_MAX)
        );
        Err(Error::unsupported(&self.path, reason))
    }
}
