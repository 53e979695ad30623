//! Storages, and tensors as views of storages, with all lengths checked.

use std::collections::BTreeMap;

use super::{
    container::{Container, missing_record},
    item::StoredTensor,
    rebuild::{bad, unsupported_dtype},
};
use crate::{
    checkpoint::len_bytes,
    error::Fault,
    pickle::{Graph, Known, Node, NodeId},
    safetensors::TensorType,
};

/// The location of a storage and the dtype it was saved as.
pub(super) struct Storage {
    key: String,
    /// `None` for an untyped storage.
    dtype: Option<TensorType>,
    /// Byte offset of its first element.
    start: u64,
    /// Its length in bytes.
    len: u64,
}

/// The element type of a storage class: `Some(None)` for an untyped storage, `None` if the type is unsupported.
fn storage_dtype(class: Known) -> Option<Option<TensorType>> {
    if class.module() == "torch.storage" {
        return matches!(class.name(), "UntypedStorage" | "_UntypedStorage").then_some(None);
    }
    TensorType::all().find(|ty| ty.torch_storage() == Some(class.name())).map(Some)
}

/// The class of a storage whose element type is unsupported.
pub(super) fn unread_storage(graph: &Graph, id: NodeId) -> Option<Known> {
    let Node::Persistent(id) = graph[id] else { return None };
    let [_, class, ..] = graph.items(id)? else { return None };
    let Node::Global(class) = graph[*class] else { return None };
    storage_dtype(class).is_none().then_some(class)
}

/// The type of a dtype constant; `None` if it is unsupported.
pub(crate) fn dtype(global: Known) -> Option<TensorType> {
    TensorType::all().find(|ty| ty.torch_name().is_some_and(|name| global.is("torch", name)))
}

/// The element size in bytes of each storage in a pickle, by storage key.
pub(super) fn element_bytes(graph: &Graph) -> BTreeMap<&str, u64> {
    let of_storage = |id: NodeId| {
        let [_, class, key, ..] = graph.items(id)? else { return None };
        let Node::Global(class) = graph[*class] else { return None };
        Some((graph.str(*key)?, storage_dtype(class)?.map_or(1, TensorType::size_bytes) as u64))
    };
    graph.persistent().filter_map(of_storage).collect()
}

/// The storage with the persistent identifier `("storage", class, key, location, element count)`.
pub(super) fn storage(graph: &Graph, container: &Container<'_>, id: NodeId) -> Result<Storage, Fault> {
    let bad = |detail| bad("a storage", detail);
    let Node::Persistent(id) = graph[id] else { return Err(bad("a storage is expected")) };
    let (kind, class, key, count) = match graph.items(id).unwrap_or_default() {
        [kind, class, key, _location, count] => (kind, class, key, count),
        // Before PyTorch 1.6, the identifier could describe a view of another storage, but no writer made one.
        [kind, class, key, _location, count, view] if graph[*view] == Node::None => (kind, class, key, count),
        _ => return Err(bad("its identifier does not have five parts")),
    };
    if graph.str(*kind) != Some("storage") {
        return Err(bad("its identifier is of another kind"));
    }
    let Node::Global(class) = graph[*class] else { return Err(bad("its class is not a class")) };
    let dtype = storage_dtype(class).ok_or_else(|| unsupported_dtype(class))?;
    let key = graph.str(*key).ok_or_else(|| bad("its key is not text"))?;
    let count = graph.u64(*count).ok_or_else(|| bad("its element count is not a count"))?;
    let name = format!("data/{key}");
    let record = container.record(&name).ok_or_else(|| missing_record(&name))?;
    let got = record.data.end - record.data.start;
    let expected = count.checked_mul(dtype.map_or(1, TensorType::size_bytes) as u64);
    let fits = expected.is_some_and(|len| if record.is_open { len <= got } else { len == got });
    match expected {
        Some(len) if fits => Ok(Storage { key: key.to_owned(), dtype, start: record.data.start, len }),
        _ => {
            let expected = expected.unwrap_or(u64::MAX);
            Err(Fault::new(format!("storage `{key}` should have {expected} bytes, but has {got}")))
        }
    }
}

impl Storage {
    /// Makes a view of the storage. `dtype` is the element type if the storage is untyped.
    pub(super) fn view(
        &self,
        dtype: Option<TensorType>,
        offset: u64,
        shape: Vec<u64>,
        strides: Vec<u64>,
    ) -> Result<StoredTensor, Fault> {
        let bad = |detail| bad("a tensor", detail);
        let dtype = dtype.or(self.dtype).ok_or_else(|| bad("its storage has no type"))?;
        if shape.len() != strides.len() {
            return Err(bad("it does not have as many strides as dimensions"));
        }
        let size = dtype.size_bytes() as u64;
        let len = len_bytes(&shape, dtype.size_bytes()).ok_or_else(|| bad("its size cannot be counted"))?;
        if len == 0 {
            return Ok(StoredTensor { dtype, shape, strides, offset: self.start });
        }
        let end = last_element(offset, &shape, &strides).and_then(|last| last.checked_add(1));
        let len = self.len / size;
        if end.is_none_or(|end| end > len) {
            let reason = format!(
                "a tensor of shape {shape:?}, strides {strides:?} and first element {offset} reaches beyond its storage \
                 `{}` of {len} elements",
                self.key
            );
            return Err(Fault::new(reason));
        }
        Ok(StoredTensor { dtype, shape, strides, offset: self.start + offset * size })
    }
}

/// The highest storage index that a tensor with elements reaches.
fn last_element(offset: u64, shape: &[u64], strides: &[u64]) -> Option<u64> {
    let mut dims = shape.iter().zip(strides);
    dims.try_fold(offset, |last, (dim, stride)| last.checked_add((dim - 1).checked_mul(*stride)?))
}
