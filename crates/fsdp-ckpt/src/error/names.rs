//! Differences between expected and present tensors.

use std::{collections::BTreeSet, fmt, path::Path};

use super::{Error, listed};
use crate::{checkpoint::Wrappers, safetensors::TensorType};

/// Maximum number of items of one kind in a message; the rest are only counted.
const LISTED_MAX: usize = 12;

/// All differences between expected and present tensors; at least one list is not empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NameDifferences {
    /// Expected tensors that are missing, in the expected order.
    pub missing: Vec<String>,
    /// Unexpected tensors, in name order.
    pub extra: Vec<String>,
    /// Tensors of another shape, in the expected order.
    pub wrong_shape: Vec<ShapeDifference>,
    /// Tensors of another dtype, in the expected order.
    pub wrong_dtype: Vec<DtypeDifference>,
    /// Tensors whose dtype cannot be converted to floating-point values, in the expected order.
    pub wrong_type: Vec<(String, TensorType)>,
}

/// A tensor whose shape is not the expected one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShapeDifference {
    /// Name of the tensor.
    pub tensor: String,
    /// The shape that was expected.
    pub expected: Vec<usize>,
    /// The shape in the file.
    pub got: Vec<usize>,
}

/// A tensor whose dtype is not the expected one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DtypeDifference {
    /// Name of the tensor.
    pub tensor: String,
    /// The expected dtype.
    pub expected: TensorType,
    /// The dtype in the file.
    pub got: TensorType,
}

impl NameDifferences {
    /// Whether there is no difference.
    pub fn is_empty(&self) -> bool {
        *self == NameDifferences::default()
    }

    /// Records a tensor that was expected with this shape, and the shape that was found, if any.
    pub(crate) fn expect(&mut self, tensor: &str, expected: &[usize], found: Option<&[usize]>) {
        match found {
            None => self.missing.push(tensor.to_owned()),
            Some(got) if got == expected => {}
            Some(got) => {
                let (tensor, expected, got) = (tensor.to_owned(), expected.to_owned(), got.to_owned());
                self.wrong_shape.push(ShapeDifference { tensor, expected, got });
            }
        }
    }

    /// Returns an error that names all differences, if there are any.
    pub(crate) fn into_result(self, path: &Path) -> Result<(), Error> {
        if self.is_empty() {
            return Ok(());
        }
        Err(Error::NamesDiffer { path: path.to_owned(), differences: Box::new(self) })
    }
}

impl fmt::Display for NameDifferences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut kinds = Vec::new();
        list(&mut kinds, "missing", &self.missing, |name| format!("`{name}`"));
        list(&mut kinds, "not expected", &self.extra, |name| format!("`{name}`"));
        list(&mut kinds, "of the wrong shape", &self.wrong_shape, |difference| {
            let ShapeDifference { tensor, expected, got } = difference;
            format!("`{tensor}` (expected {expected:?}, got {got:?})")
        });
        list(&mut kinds, "of the wrong type", &self.wrong_dtype, |difference| {
            let DtypeDifference { tensor, expected, got } = difference;
            format!("`{tensor}` (expected {expected}, got {got})")
        });
        list(&mut kinds, "of a type that is not F64, F32, BF16 or F16", &self.wrong_type, |(name, dtype)| {
            format!("`{name}` ({dtype})")
        });
        f.write_str(&kinds.join("; "))?;
        let wrappers = Wrappers::in_names(self.extra.iter().map(String::as_str));
        let wrappers: BTreeSet<&str> = self.extra.iter().flat_map(|name| wrappers.strip(name).1).collect();
        if wrappers.is_empty() {
            return f.write_str("; check that config and weights belong together");
        }
        let wrappers: Vec<String> = wrappers.into_iter().map(|wrapper| format!("`{wrapper}.`")).collect();
        let found = wrappers.join(", ");
        write!(f, "; module wrappers added {found} to names: `fsdp ckpt convert --strip-wrappers` removes it")
    }
}

fn list<T>(kinds: &mut Vec<String>, kind: &str, items: &[T], show: impl Fn(&T) -> String) {
    if items.is_empty() {
        return;
    }
    let shown: Vec<String> = items.iter().map(show).collect();
    kinds.push(format!("{} {kind}: {}", items.len(), listed(&shown, LISTED_MAX)));
}
