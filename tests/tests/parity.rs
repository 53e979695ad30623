//! Sharded training equals unsharded training.

use fsdp_train::verify::{VerifyOptions, VerifyReport, verify};

use crate::support::{GPT2, LLAMA, config, job, packed, threads};

fn check(model: &str, vocab: u32, worlds: &[usize], overrides: &[&str]) -> VerifyReport {
    let dir = tempfile::tempdir().unwrap();
    let job = job(model, config(dir.path(), vocab, overrides));
    let report = verify(&job, &threads(), &VerifyOptions::new(worlds, 3)).unwrap_or_else(|e| panic!("{e}"));
    for world in &report.worlds {
        assert!(world.failures.is_empty(), "world {}: {:#?}", world.world, world.failures);
    }
    report
}

#[test]
fn llama_is_bitwise_equal_at_every_world_size() {
    let report = check(LLAMA, 61, &[1, 2, 4, 8], &["fsdp.wrap=[\"LlamaDecoderLayer\"]"]);
    assert_eq!(report.worlds.len(), 4);
    assert!(report.worlds.iter().all(|world| world.promise == "equal bits (D2)"));
}

#[test]
fn gpt2_with_dropout_is_bitwise_equal_at_every_world_size() {
    let report = check(GPT2, 53, &[1, 2, 4, 8], &["fsdp.wrap=[\"GPT2Block\"]"]);
    assert!(report.worlds.iter().all(|world| world.promise == "equal bits (D2)"));
}

#[test]
fn packed_documents_are_bitwise_equal_at_every_world_size() {
    for (model, vocab, class) in [(LLAMA, 61, "LlamaDecoderLayer"), (GPT2, 53, "GPT2Block")] {
        let dir = tempfile::tempdir().unwrap();
        let [data, packing, eos] = packed(dir.path(), vocab);
        let overrides = [
            data.as_str(),
            &packing,
            &eos,
            &format!("fsdp.wrap=[\"{class}\"]"),
            "fsdp.activation_checkpointing=\"selective\"",
        ];
        let job = job(model, config(dir.path(), vocab.into(), &overrides));
        let report =
            verify(&job, &threads(), &VerifyOptions::new(&[1, 2, 4], 3)).unwrap_or_else(|e| panic!("{e}"));
        for world in &report.worlds {
            assert!(world.failures.is_empty(), "world {}: {:#?}", world.world, world.failures);
            assert_eq!(world.promise, "equal bits (D2)");
        }
    }
}

#[test]
fn adafactor_stays_within_derived_bounds() {
    let optimizer =
        "train.optimizer={ name = \"adafactor\", lr = 1e-2, relative_step = false, scale_parameter = false }";
    check(LLAMA, 61, &[1, 2, 4], &["fsdp.wrap=[\"LlamaDecoderLayer\"]", optimizer]);
    let optimizer = "train.optimizer={ name = \"adafactor\", relative_step = true }";
    check(GPT2, 53, &[1, 2, 3, 4], &["fsdp.wrap=[\"GPT2Block\"]", optimizer, "fsdp.mesh={ replicate = 2 }"]);
}
