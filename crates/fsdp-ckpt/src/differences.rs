//! Differences between expected and present tensors, all in one message.

use std::{collections::BTreeSet, path::Path};

use crate::{
    checkpoint::Wrappers,
    error::{Error, listed},
    safetensors::TensorType,
};

/// Maximum number of items of one kind in a message; the rest are only counted.
const LISTED_MAX: usize = 12;

/// All differences that were found so far, in the expected order.
#[derive(Debug, Default)]
pub(crate) struct Differences {
    /// Expected tensors that are missing.
    pub(crate) missing: Vec<String>,
    /// Unexpected tensors, in name order.
    pub(crate) extra: Vec<String>,
    wrong_shape: Vec<String>,
    wrong_dtype: Vec<String>,
    no_float: Vec<String>,
}

impl Differences {
    /// Records a tensor that was expected with this shape, and the shape that was found, if any.
    pub(crate) fn expect(&mut self, tensor: &str, expected: &[usize], found: Option<&[usize]>) {
        match found {
            None => self.missing.push(tensor.to_owned()),
            Some(got) if got == expected => {}
            Some(got) => {
                self.wrong_shape.push(format!("`{tensor}` (expected {expected:?}, got {got:?})"));
            }
        }
    }

    /// Records a tensor of another dtype than the expected one.
    pub(crate) fn wrong_dtype(&mut self, tensor: &str, expected: TensorType, got: TensorType) {
        self.wrong_dtype.push(format!("`{tensor}` (expected {expected}, got {got})"));
    }

    /// Records a tensor whose dtype does not convert to floating-point values.
    pub(crate) fn no_float(&mut self, tensor: &str, dtype: TensorType) {
        self.no_float.push(format!("`{tensor}` ({dtype})"));
    }

    /// Returns an error that names all differences, if there are any.
    pub(crate) fn into_result(self, path: &Path) -> Result<(), Error> {
        let quoted = |names: &[String]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>();
        let kinds = [
            ("missing", quoted(&self.missing)),
            ("not expected", quoted(&self.extra)),
            ("of the wrong shape", self.wrong_shape),
            ("of the wrong type", self.wrong_dtype),
            ("of a type that is not F64, F32, BF16 or F16", self.no_float),
        ];
        let kinds = kinds.iter().filter(|(_, items)| !items.is_empty());
        let kinds =
            kinds.map(|(kind, items)| format!("{} {kind}: {}", items.len(), listed(items, LISTED_MAX)));
        let mut all: Vec<String> = kinds.collect();
        if all.is_empty() {
            return Ok(());
        }
        let wrappers = Wrappers::in_names(self.extra.iter().map(String::as_str));
        let wrappers: BTreeSet<&str> = self.extra.iter().flat_map(|name| wrappers.strip(name).1).collect();
        let found: Vec<String> = wrappers.into_iter().map(|wrapper| format!("`{wrapper}.`")).collect();
        all.push(match &found[..] {
            [] => "check that config and weights belong together".to_owned(),
            found => format!(
                "module wrappers added {} to names: `fsdp ckpt convert --strip-wrappers` removes it",
                found.join(", ")
            ),
        });
        Err(Error::NamesDiffer { path: path.to_owned(), differences: all.join("; ") })
    }
}
