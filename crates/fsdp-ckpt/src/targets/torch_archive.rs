//! The common parts of `torch.save` files and DCP items: the archive's records and pickled tensors.

use crate::{
    checkpoint::packed_strides, pickle::writer::PickleWriter, safetensors::TensorType, zip::writer::Archive,
};

/// Returns an archive with all records that torch writes before the storages.
pub(crate) fn begin(root: &str, pickle: &[u8]) -> Archive {
    let mut archive = Archive::new();
    archive.add(&format!("{root}/data.pkl"), pickle);
    archive.add(&format!("{root}/.format_version"), b"1");
    archive.add(&format!("{root}/.storage_alignment"), b"64");
    archive.add(&format!("{root}/byteorder"), b"little");
    archive
}

/// Adds the records that torch writes after the storages. Its archive id is omitted: readers do not need it, and it
/// would depend on all data.
pub(crate) fn end(root: &str, archive: &mut Archive) {
    archive.add(&format!("{root}/version"), b"3\n");
}

/// Adds the storage with this key, and returns the offset of its bytes.
pub(crate) fn storage(root: &str, archive: &mut Archive, key: usize, len: u64) -> u64 {
    archive.add_later(&format!("{root}/data/{key}"), len)
}

/// Pickles a contiguous tensor that fills the storage with this key.
pub(crate) fn tensor(w: &mut PickleWriter, key: usize, dtype: TensorType, shape: &[u64]) {
    let elements: u64 = shape.iter().product();
    let typed = dtype.torch_storage();
    let rebuild = if typed.is_some() { "_rebuild_tensor_v2" } else { "_rebuild_tensor_v3" };
    w.call("torch._utils", rebuild, |w| {
        w.persistent(|w| {
            w.text("storage");
            match typed {
                Some(class) => w.global("torch", class),
                None => w.global("torch.storage", "UntypedStorage"),
            }
            w.text(&key.to_string());
            w.text("cpu");
            // Untyped storages count bytes.
            w.count(if typed.is_some() { elements } else { elements * dtype.size_bytes() as u64 });
        });
        w.int(0);
        w.counts(shape);
        w.counts(&packed_strides(shape));
        w.bool(false);
        w.call("collections", "OrderedDict", |_| ());
        if typed.is_none() {
            w.global("torch", dtype.torch_name().expect("types without a name are refused"));
        }
    });
}
