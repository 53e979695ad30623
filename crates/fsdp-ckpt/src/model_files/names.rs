//! Strictness: the tensors that are there are exactly those that were expected.

use std::collections::BTreeSet;

use super::ModelReader;
use crate::error::{Error, NameDifferences, ShapeDifference};

impl ModelReader {
    /// Checks that the model has exactly the expected tensors, by name and shape. A name may be expected more
    /// than once.
    ///
    /// # Errors
    /// [`Error::NamesDiffer`] with *all* missing, unexpected and wrongly shaped tensors.
    pub fn check_names<N, S>(&self, expected: impl IntoIterator<Item = (N, S)>) -> Result<(), Error>
    where
        N: AsRef<str>,
        S: AsRef<[usize]>,
    {
        self.check_names_except(expected, |_| false)
    }

    /// As [`check_names`](Self::check_names), but unexpected tensors for which `ignored` holds are no error:
    /// buffers that old files carry and models compute.
    ///
    /// # Errors
    /// [`Error::NamesDiffer`].
    pub fn check_names_except<N, S>(
        &self,
        expected: impl IntoIterator<Item = (N, S)>,
        ignored: impl Fn(&str) -> bool,
    ) -> Result<(), Error>
    where
        N: AsRef<str>,
        S: AsRef<[usize]>,
    {
        let mut differences = NameDifferences::default();
        let mut seen = BTreeSet::new();
        for (name, shape) in expected {
            let (name, shape) = (name.as_ref(), shape.as_ref());
            seen.insert(name.to_owned());
            match self.entry(name) {
                Err(_) => differences.missing.push(name.to_owned()),
                Ok(entry) if entry.shape() != shape => differences.wrong_shape.push(ShapeDifference {
                    tensor: name.to_owned(),
                    expected: shape.to_owned(),
                    got: entry.shape().to_owned(),
                }),
                Ok(_) => {}
            }
        }
        let extra = self.names().filter(|name| !seen.contains(*name) && !ignored(name));
        differences.extra = extra.map(str::to_owned).collect();
        if differences.is_empty() {
            return Ok(());
        }
        Err(Error::NamesDiffer { path: self.path.clone(), differences: Box::new(differences) })
    }
}
