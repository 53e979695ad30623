//! Steps that XLA compiles, on the devices of a plugin for processors (`FSDP_TEST_PJRT` names its library).

use std::path::PathBuf;

use fsdp_train::verify::{VerifyOptions, verify};
use fsdp_xla::{Devices, ProgramOptions};

use crate::support::{GPT2, LLAMA, config, job, options};

/// The plugin, if there is one to test with.
fn plugin(test: &str) -> Option<PathBuf> {
    let plugin = std::env::var_os("FSDP_TEST_PJRT").map(PathBuf::from);
    if plugin.is_none() {
        println!("skipped: {test} needs a PJRT plugin for processors, named by FSDP_TEST_PJRT");
    }
    plugin
}

fn check(model: &str, vocab: u32, overrides: &[&str]) {
    let Some(plugin) = plugin("this test") else { return };
    let dir = tempfile::tempdir().unwrap();
    let overrides: Vec<&str> = overrides.iter().copied().chain(["run.device=\"xla\""]).collect();
    let job = job(model, config(dir.path(), vocab, &overrides));
    let devices = Devices::new(&plugin, 4, ProgramOptions::default(), options()).unwrap();
    let report = verify(&job, &devices, &VerifyOptions::new(&[1, 2, 4], 2)).unwrap();
    assert!(report.holds(), "{report:#?}");
}

#[test]
fn a_llama_is_trained() {
    check(LLAMA, 61, &["fsdp.wrap=[\"LlamaDecoderLayer\"]"]);
}

#[test]
fn a_gpt2_with_dropout_is_trained() {
    check(GPT2, 53, &["fsdp.wrap=[\"GPT2Block\"]"]);
}
