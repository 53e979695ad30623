//! Strictness: the tensors that are there are exactly those that were expected.

use std::collections::BTreeSet;

use super::ModelReader;
use crate::error::{Error, NameDifferences, ShapeDifference};
use crate::safetensors::TensorType;

impl ModelReader {
    /// Checks that the model has exactly the expected tensors, by name and shape, each of a type that `accepts`
    /// holds for (one that converts to floating-point values, where values are wanted). A name may be expected
    /// more than once. Unexpected tensors for which `ignored` holds are no error: buffers that old files carry and
    /// models compute.
    ///
    /// # Errors
    /// [`Error::NamesDiffer`] with *all* missing, unexpected, wrongly shaped and wrongly typed tensors.
    pub fn check_tensors<N, S>(
        &self,
        expected: impl IntoIterator<Item = (N, S)>,
        ignored: impl Fn(&str) -> bool,
        accepts: impl Fn(TensorType) -> bool,
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
            let Ok(entry) = self.entry(name) else {
                differences.missing.push(name.to_owned());
                continue;
            };
            if entry.shape() != shape {
                differences.wrong_shape.push(ShapeDifference {
                    tensor: name.to_owned(),
                    expected: shape.to_owned(),
                    got: entry.shape().to_owned(),
                });
            }
            if !accepts(entry.dtype()) {
                differences.wrong_type.push((name.to_owned(), entry.dtype()));
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
