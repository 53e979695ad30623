//! Directories of PyTorch's distributed checkpoints (DCP) are read to what was saved.

use fsdp_ckpt::{
    checkpoint::{Checkpoint, Key, Role, Source},
    formats::{dcp, torch_file},
};

use crate::{assert_equals_safetensors, bytes_of, fixture, source_bytes};

/// Checks tensors, values and checksums of a directory that holds the whole training state.
fn assert_is_training_state(name: &str) -> Checkpoint {
    let checkpoint = dcp::open(&fixture(name)).unwrap();
    assert_equals_safetensors(&checkpoint, &fixture("full.safetensors"), "");
    checkpoint.check_coverage().unwrap();
    let expected = torch_file::open(fixture("full.pth")).unwrap();
    assert_eq!(checkpoint.values, expected.values);
    for (name, tensor) in &expected.tensors {
        let found = &checkpoint.tensors[name];
        assert_eq!((&found.path, found.role), (&tensor.path, tensor.role), "{name}");
    }
    for protection in &checkpoint.protections {
        let bytes = source_bytes(&checkpoint.sources[protection.source]);
        let range = protection.range.start as usize..protection.range.end as usize;
        assert_eq!(protection.digest.kind.of(&bytes[range]), protection.digest, "{}", protection.what);
    }
    assert_eq!(checkpoint.notes, [""; 0]);
    checkpoint
}

#[test]
fn two_ranks_with_uneven_rows_are_read() {
    let checkpoint = assert_is_training_state("dcp_2rank");
    assert_eq!(checkpoint.world_size, Some(2));
    assert_eq!(checkpoint.format, "PyTorch DCP 1.0.0");
    assert_eq!(checkpoint.sources.len(), 2);
}

#[test]
fn hsdp_ranks_with_out_of_order_chunks_are_read() {
    let checkpoint = assert_is_training_state("dcp_hsdp_2x2");
    assert_eq!(checkpoint.world_size, Some(4));
}

#[test]
fn zstd_compressed_items_are_read() {
    let checkpoint = assert_is_training_state("dcp_2rank_zstd");
    assert_eq!(checkpoint.format, "PyTorch DCP 1.0.0, zstd");
    assert!(checkpoint.sources.iter().all(|source| matches!(source, Source::Zstd { .. })));
}

#[test]
fn fsdp1_sharded_state_dicts_are_read() {
    let expected = torch_file::open(fixture("fsdp1/reference.pth")).unwrap();
    for name in ["fsdp1/sharded", "fsdp1/sharded_dt"] {
        let checkpoint = dcp::open(&fixture(name)).unwrap();
        checkpoint.check_coverage().unwrap();
        assert_eq!(checkpoint.tensors.len(), expected.tensors.len());
        for name in expected.tensors.keys() {
            let full_name = format!("model.{name}");
            let found = &checkpoint.tensors[&full_name];
            assert_eq!(found.path, [Key::Name("model".to_owned()), Key::Name(name.clone())]);
            assert_eq!(found.role, Role::Model);
            assert_eq!(bytes_of(&checkpoint, &full_name), bytes_of(&expected, name), "{name}");
        }
    }
}
