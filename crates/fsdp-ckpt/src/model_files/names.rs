//! Strictness: the tensors that are there are exactly those that were expected.

use std::collections::BTreeSet;

use super::ModelReader;
use crate::error::{Error, NameDifferences, ShapeDifference};
use crate::safetensors::TensorType;

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

    /// As [`check_names_except`](Self::check_names_except), and every expected tensor must be of a type that
    /// converts to floating-point values.
    ///
    /// # Errors
    /// [`Error::NamesDiffer`] with these too.
    pub fn check_floats_except<N, S>(
        &self,
        expected: impl IntoIterator<Item = (N, S)>,
        ignored: impl Fn(&str) -> bool,
    ) -> Result<(), Error>
    where
        N: AsRef<str>,
        S: AsRef<[usize]>,
    {
        self.check(expected, ignored, TensorType::is_convertible)
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
        self.check(expected, ignored, |_| true)
    }

    fn check<N, S>(
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
