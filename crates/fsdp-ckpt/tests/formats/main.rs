//! Format readers, tested on files written by the tools that define the formats.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

/// PyTorch's distributed checkpoints (DCP).
mod dcp;
/// Files of `torch.save`.
mod torch_file;

/// Directories of DeepSpeed ZeRO.
mod deepspeed;

/// Folders written by trainers.
mod folders;

/// One file per rank with distributed tensors.
mod rank_files;

/// Checkpoints of Megatron Core.
mod megatron;

/// Checkpoints of Orbax.
mod orbax;

/// One file per rank, written by PyTorch/XLA.
mod xla;

/// Whole checkpoints of other trainers.
mod trainers;

/// Damaged and altered files are refused or read within their bounds, without a panic.
mod damage;

use std::{
    fs,
    path::{Path, PathBuf},
};

use fsdp_ckpt::{
    checkpoint::{Checkpoint, Region, Source},
    safetensors::SafetensorsReader,
};

/// A file or directory of `tests/fixtures`.
fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Returns all bytes of a tensor in C order, copied element by element.
fn bytes_of(checkpoint: &Checkpoint, name: &str) -> Vec<u8> {
    let tensor = &checkpoint.tensors[name];
    let size = tensor.dtype.size_bytes();
    let mut out = vec![0; tensor.len_bytes() as usize];
    let mut filled = vec![0; tensor.len() as usize];
    for chunk in &tensor.chunks {
        let source = source_bytes(&checkpoint.sources[chunk.source]);
        for (element, distance) in elements(&chunk.region, &tensor.shape) {
            let from = chunk.offset as usize + distance as usize * size;
            out[element as usize * size..][..size].copy_from_slice(&source[from..from + size]);
            filled[element as usize] += 1;
        }
    }
    assert!(filled.iter().all(|&times| times == 1), "{name}: each element once");
    out
}

/// Returns all bytes of a source, decoded.
fn source_bytes(source: &Source) -> Vec<u8> {
    match source {
        Source::File { path, len } => {
            let bytes = fs::read(path).unwrap();
            assert_eq!(bytes.len() as u64, *len);
            bytes
        }
        Source::Zstd { path, range, decoded_len_max } => {
            let bytes = fs::read(path).unwrap();
            let decoded = zstd::decode_all(&bytes[range.start as usize..range.end as usize]).unwrap();
            assert!(decoded.len() as u64 <= *decoded_len_max);
            decoded
        }
        Source::Inline { stream, decoded_len_max, .. } => {
            let decoded = zstd::decode_all(&**stream).unwrap();
            assert!(decoded.len() as u64 <= *decoded_len_max);
            decoded
        }
    }
}

/// Returns the elements of a region: index in the flattened tensor, offset from the chunk's first element.
fn elements(region: &Region, shape: &[u64]) -> Vec<(u64, u64)> {
    match region {
        Region::Flat(range) => range.clone().zip(0..).collect(),
        Region::Box { offsets, sizes, strides } => {
            let mut found = vec![(0, 0)];
            for dim in 0..shape.len() {
                let step = |(flat, distance): (u64, u64)| {
                    let along = move |i| (flat * shape[dim] + offsets[dim] + i, distance + i * strides[dim]);
                    (0..sizes[dim]).map(along)
                };
                found = found.into_iter().flat_map(step).collect();
            }
            found
        }
    }
}

/// Compares all tensors with those of a safetensors file, whose names start with `prefix`.
fn assert_equals_safetensors(checkpoint: &Checkpoint, file: &Path, prefix: &str) {
    let expected = SafetensorsReader::open(file).unwrap();
    let names: Vec<&str> = expected.names().filter_map(|name| name.strip_prefix(prefix)).collect();
    let found: Vec<&str> = checkpoint.tensors.keys().map(String::as_str).collect();
    let mut sorted = names.clone();
    sorted.sort_unstable();
    assert_eq!(found, sorted);
    for name in names {
        let entry = expected.entry(&format!("{prefix}{name}")).unwrap();
        let tensor = &checkpoint.tensors[name];
        let shape: Vec<u64> = entry.shape().iter().map(|&dim| dim as u64).collect();
        assert_eq!((tensor.dtype, &tensor.shape), (entry.dtype(), &shape), "{name}");
        let mut bytes = vec![0; entry.len_bytes() as usize];
        expected.read_rows(&format!("{prefix}{name}"), 0..entry.row_count(), &mut bytes).unwrap();
        assert_eq!(bytes_of(checkpoint, name), bytes, "{name}");
    }
}
