//! Strictness: the tensors that are there are exactly those that were expected.

use std::collections::BTreeSet;

use super::ModelReader;
use crate::error::{Error, NameDifferences};
use crate::safetensors::{TensorEntry, TensorType};

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
            let entry = self.entry(name).ok();
            differences.expect(name, shape, entry.map(TensorEntry::shape));
            let dtype = entry.map(TensorEntry::dtype).filter(|dtype| !accepts(*dtype));
            differences.wrong_type.extend(dtype.map(|dtype| (name.to_owned(), dtype)));
        }
        let extra = self.names().filter(|name| !seen.contains(*name) && !ignored(name));
        differences.extra = extra.map(str::to_owned).collect();
        differences.into_result(&self.path)
    }
}
