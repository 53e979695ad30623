//! Adds the content of a `torch.save` file as it is: tensors and values under flattened names.

use super::{
    local::LocalTensor,
    optimizer::{expect_free, put_tensor},
};
use crate::{
    checkpoint::{Checkpoint, Global, Key, Object, Role, flatten, join},
    error::Fault,
    torch::Item,
};

/// Adds the leaves of a tree in the file with index `source`. `wrapped` is the error for a tensor of a wrapper subclass.
pub(crate) fn add_tree(
    root: &Item,
    source: usize,
    role: Role,
    wrapped: impl Fn(&str, &Global) -> Fault,
    into: &mut Checkpoint,
) -> Result<(), Fault> {
    for (path, item) in flatten(root)? {
        match item {
            Item::Tensor(stored) => {
                put_tensor(into, LocalTensor::of(stored, source).to_tensor(path, role))?;
            }
            Item::Wrapped { class, .. } => return Err(wrapped(&join(&path), class)),
            item => add_value(item, path, role, into)?,
        }
    }
    Ok(())
}

/// Adds a leaf that is not a tensor.
pub(crate) fn add_value(item: &Item, path: Vec<Key>, role: Role, into: &mut Checkpoint) -> Result<(), Fault> {
    let name = join(&path);
    if item.holds_tensor() {
        into.notes.push(format!("the object `{name}` holds tensors, which are not read"));
    }
    expect_free(into, &name)?;
    into.values.insert(name, Object { path, role, value: item.to_value() });
    Ok(())
}
