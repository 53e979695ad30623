//! `.metadata`: the pickle of PyTorch's metadata classes.
//!
//! Tensor properties are a 5-tuple, as up to torch 2.14; later versions append a sixth element, which they do not
//! require when reading. `planner_data` lists the path of every name; without it, loaders would return nested keys
//! flat. The save has no id, so that equal checkpoints are equal files.

use super::{Contents, Item, PlacedChunk};
use crate::{checkpoint::Key, pickle::writer::PickleWriter, safetensors::TensorType};

/// Name of the metadata file.
pub(super) const FILE_NAME: &str = ".metadata";

const METADATA: &str = "torch.distributed.checkpoint.metadata";
const FILESYSTEM: &str = "torch.distributed.checkpoint.filesystem";

/// Name of a rank's file.
pub(super) fn file_name(rank: usize) -> String {
    format!("__{rank}_0.distcp")
}

/// Returns the content of `.metadata`.
pub(super) fn pickle(contents: &Contents<'_>) -> Vec<u8> {
    let mut w = PickleWriter::new();
    w.object(METADATA, "Metadata", |w| {
        w.dict(|w| {
            w.text("state_dict_metadata");
            w.dict(|w| state_dict_metadata(w, contents));
            w.text("planner_data");
            w.dict(|w| planner_data(w, contents));
            w.text("storage_data");
            w.dict(|w| storage_data(w, contents));
            w.text("storage_meta");
            storage_meta(w);
            w.text("version");
            w.text("1.0.0");
        });
    });
    w.finish()
}

fn state_dict_metadata(w: &mut PickleWriter, contents: &Contents<'_>) {
    for (name, _, _) in &contents.values {
        w.text(name);
        w.object(METADATA, "BytesStorageMetadata", |w| w.dict(|_| ()));
    }
    for (tensor, chunks) in &contents.tensors {
        w.text(&tensor.name);
        w.object(METADATA, "TensorStorageMetadata", |w| {
            w.dict(|w| {
                w.text("properties");
                properties(w, tensor.dtype);
                w.text("size");
                w.torch_size(&tensor.shape);
                w.text("chunks");
                w.list(|w| chunks.iter().for_each(|chunk| chunk_metadata(w, chunk, &tensor.shape)));
            });
        });
    }
}

fn properties(w: &mut PickleWriter, dtype: TensorType) {
    w.object(METADATA, "TensorProperties", |w| {
        w.tuple(|w| {
            w.global("torch", dtype.torch_name().expect("types without a name are refused"));
            w.call("torch.serialization", "_get_layout", |w| w.text("torch.strided"));
            w.bool(false);
            w.call(METADATA, "_MEM_FORMAT_ENCODING", |w| w.int(0));
            w.bool(false);
        });
    });
}

fn chunk_metadata(w: &mut PickleWriter, chunk: &PlacedChunk, shape: &[u64]) {
    let mut sizes = shape.to_vec();
    if let Some(rows) = sizes.first_mut() {
        *rows = chunk.row_count;
    }
    w.object(METADATA, "ChunkStorageMetadata", |w| {
        w.dict(|w| {
            w.text("offsets");
            w.torch_size(&offsets(chunk, shape));
            w.text("sizes");
            w.torch_size(&sizes);
        });
    });
}

fn offsets(chunk: &PlacedChunk, shape: &[u64]) -> Vec<u64> {
    let mut offsets = vec![0; shape.len()];
    if let Some(first) = offsets.first_mut() {
        *first = chunk.first_row;
    }
    offsets
}

fn planner_data(w: &mut PickleWriter, contents: &Contents<'_>) {
    let tensors = contents.tensors.iter().map(|(tensor, _)| (&tensor.name, tensor.path.as_slice()));
    let values = contents.values.iter().map(|(name, path, _)| (name, *path));
    for (name, path) in tensors.chain(values) {
        w.text(name);
        w.tuple(|w| {
            for key in path {
                match key {
                    Key::Name(name) => w.text(name),
                    Key::Index(index) => w.count(*index),
                }
            }
        });
    }
}

fn storage_data(w: &mut PickleWriter, contents: &Contents<'_>) {
    for (name, _, item) in &contents.values {
        index(w, name, None);
        storage_info(w, item);
    }
    for (tensor, chunks) in &contents.tensors {
        for (position, chunk) in chunks.iter().enumerate() {
            index(w, &tensor.name, Some((position, offsets(chunk, &tensor.shape))));
            storage_info(w, &chunk.item);
        }
    }
}

fn index(w: &mut PickleWriter, name: &str, chunk: Option<(usize, Vec<u64>)>) {
    w.object(METADATA, "MetadataIndex", |w| {
        w.dict(|w| {
            w.text("fqn");
            w.text(name);
            w.text("index");
            match chunk {
                None => w.none(),
                Some((position, offsets)) => {
                    w.count(position as u64);
                    w.text("offset");
                    w.torch_size(&offsets);
                }
            }
        });
    });
}

fn storage_info(w: &mut PickleWriter, item: &Item) {
    w.object(FILESYSTEM, "_StorageInfo", |w| {
        w.dict(|w| {
            w.text("relative_path");
            w.text(&file_name(item.rank));
            w.text("offset");
            w.count(item.offset);
            w.text("length");
            w.count(item.len);
        });
    });
}

fn storage_meta(w: &mut PickleWriter) {
    w.object(METADATA, "StorageMeta", |w| {
        w.dict(|w| {
            for field in ["checkpoint_id", "save_id", "load_id"] {
                w.text(field);
                w.none();
            }
            w.text("modules");
            w.list(|_| ());
        });
    });
}
