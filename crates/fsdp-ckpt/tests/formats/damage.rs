//! Real files, damaged at random: whatever a reader returns for one refers only to bytes inside the file.
//!
//! Checksums of records are removed first, so that the damage reaches the parsers.

use std::fs;

use fsdp_ckpt::{
    checkpoint::{Checkpoint, Region, Source},
    formats::torch_file,
};
use proptest::prelude::*;

use crate::fixture;

const FILES: [&str; 6] = [
    "kinds.pth",
    "model_only.pth",
    "full.pth",
    "fsdp1/local_rank0.pth",
    "fsdp2_rank_pth/model_world_size_2_rank_0.pt",
    "xla_fsdp_2rank/trained_rank-00000000-of-00000002.pth",
];

/// Returns a fixture whose archive marks all checksums as not computed.
fn without_checksums(name: &str) -> Vec<u8> {
    let mut bytes = fs::read(fixture(name)).unwrap();
    let entries: Vec<usize> = bytes
        .windows(4)
        .enumerate()
        .filter(|(_, window)| *window == b"PK\x01\x02")
        .map(|(at, _)| at)
        .collect();
    assert!(entries.len() > 3);
    entries.iter().for_each(|at| bytes[at + 16..at + 20].fill(0));
    bytes
}

fn open(bytes: &[u8]) -> Option<Checkpoint> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("damaged.pth");
    fs::write(&path, bytes).unwrap();
    torch_file::open(&path).ok()
}

/// Checks what every reader guarantees: all tensors lie inside their sources.
fn assert_inside_sources(checkpoint: &Checkpoint) {
    let len = |source: usize| match &checkpoint.sources[source] {
        Source::File { len, .. } => *len,
        Source::Zstd { decoded_len_max, .. } | Source::Inline { decoded_len_max, .. } => *decoded_len_max,
    };
    for (name, tensor) in &checkpoint.tensors {
        assert!(tensor.len_bytes() < 1 << 63, "{name}");
        for chunk in &tensor.chunks {
            let last = match &chunk.region {
                region if region.is_empty() => continue,
                Region::Flat(range) => range.end - range.start - 1,
                Region::Box { sizes, strides, .. } => {
                    sizes.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum()
                }
            };
            let end = chunk.offset + (last + 1) * tensor.dtype.size_bytes() as u64;
            assert!(end <= len(chunk.source), "{name} ends at {end}");
        }
    }
    for protection in &checkpoint.protections {
        assert!(protection.range.end <= len(protection.source), "{}", protection.what);
    }
}

#[test]
fn truncated_file_is_rejected() {
    let bytes = without_checksums("model_only.pth");
    for len in (0..bytes.len()).step_by(7) {
        assert!(open(&bytes[..len]).is_none(), "{len} bytes");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn changed_bytes_are_rejected_or_read_within_file(
        name in prop::sample::select(&FILES[..]),
        in_pickle in any::<bool>(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
    ) {
        let mut bytes = without_checksums(name);
        // Half of the cases damage the pickle, the densest structure, at the start of the file.
        let len = if in_pickle { bytes.len().min(3000) } else { bytes.len() };
        changes.iter().for_each(|(at, byte)| bytes[at.index(len)] = *byte);
        if let Some(checkpoint) = open(&bytes) {
            assert_inside_sources(&checkpoint);
        }
    }

    #[test]
    fn moved_bytes_are_rejected_or_read_within_file(
        name in prop::sample::select(&FILES[..]),
        from in any::<prop::sample::Index>(),
        to in any::<prop::sample::Index>(),
        len in 1usize..200,
    ) {
        let mut bytes = without_checksums(name);
        let (from, to) = (from.index(bytes.len()), to.index(bytes.len()));
        let len = len.min(bytes.len() - from).min(bytes.len() - to);
        bytes.copy_within(from..from + len, to);
        if let Some(checkpoint) = open(&bytes) {
            assert_inside_sources(&checkpoint);
        }
    }
}
