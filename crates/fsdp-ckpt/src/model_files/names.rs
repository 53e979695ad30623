//! Checks that a model has exactly the expected tensors.

use std::{collections::BTreeSet, path::Path};

use super::ModelReader;
use crate::{differences::Differences, error::Error, safetensors::TensorType};

impl ModelReader {
    /// Checks that the model has exactly the expected tensors, by name and shape, each of a dtype that `accepts` (a
    /// convertible one, if the caller wants floating-point values). A name may be expected more than once. Unexpected
    /// tensors are allowed if `ignored` returns true, for buffers that old files store and models compute.
    ///
    /// # Errors
    /// [`Error::NamesDiffer`] with *all* tensors that are missing, unexpected, or of the wrong shape or dtype.
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
        let find = |name: &str| {
            let entry = self.entry(name).ok()?;
            Some((entry.dtype(), entry.shape().to_owned()))
        };
        check_names(&self.path, (self.names(), find), expected, ignored, accepts)
    }
}

/// Checks any set of tensors in the same way, given their names and a lookup of dtype and shape.
pub(crate) fn check_names<'a, N, S>(
    path: &Path,
    (names, find): (impl Iterator<Item = &'a str>, impl Fn(&str) -> Option<(TensorType, Vec<usize>)>),
    expected: impl IntoIterator<Item = (N, S)>,
    ignored: impl Fn(&str) -> bool,
    accepts: impl Fn(TensorType) -> bool,
) -> Result<(), Error>
where
    N: AsRef<str>,
    S: AsRef<[usize]>,
{
    let mut differences = Differences::default();
    let mut seen = BTreeSet::new();
    for (name, shape) in expected {
        let (name, shape) = (name.as_ref(), shape.as_ref());
        seen.insert(name.to_owned());
        let found = find(name);
        differences.expect(name, shape, found.as_ref().map(|(_, shape)| &shape[..]));
        if let Some((dtype, _)) = found.filter(|(dtype, _)| !accepts(*dtype)) {
            differences.no_float(name, dtype);
        }
    }
    let extra = names.filter(|name| !seen.contains(*name) && !ignored(name));
    differences.extra = extra.map(str::to_owned).collect();
    differences.into_result(path)
}
