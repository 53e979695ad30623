//! Every model family, with the configurations of its golden files.

use std::path::Path;

use fsdp_config::Ranks;
use fsdp_core::{Axis, Mesh};
use fsdp_nn::hf::{FAMILIES, HfConfig};
use fsdp_train::verify::{VerifyOptions, verify};

use crate::support::{config, job, threads};

/// Returns the text of a golden `config.json`.
fn golden(case: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(case);
    std::fs::read_to_string(folder.join("config.json")).unwrap()
}

/// Returns the folders of all families, with the class of their layers.
fn cases() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/families");
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let mut cases: Vec<String> = names.map(|name| format!("families/{}", name.to_str().unwrap())).collect();
    cases.extend(["gpt2".to_owned(), "llama-gqa".to_owned()]);
    cases.sort();
    let layers = |case: String| {
        let model = HfConfig::parse(&golden(&case)).unwrap().build().unwrap();
        let modules = &model.description().spec.modules;
        let list = modules.iter().position(|module| module.class == "ModuleList");
        let layer = modules.iter().find(|module| module.parent == list).unwrap();
        (case, layer.class.clone())
    };
    cases.into_iter().map(layers).collect()
}

#[test]
fn every_family_has_golden_files() {
    let families: Vec<&str> =
        cases().iter().map(|(case, _)| HfConfig::parse(&golden(case)).unwrap().family().model_type).collect();
    for family in FAMILIES {
        assert!(families.contains(&family.model_type), "{} has none", family.model_type);
    }
}

#[test]
fn every_family_is_bitwise_equal_at_every_world_size() {
    for (case, layer) in cases() {
        let dir = tempfile::tempdir().unwrap();
        let text = golden(&case);
        let vocab = HfConfig::parse(&text).unwrap().summary().vocab as u32;
        let wrap = format!("fsdp.wrap=[\"{layer}\"]");
        let job = job(&text, config(dir.path(), vocab, &[&wrap]));
        let report = verify(&job, &threads(), &VerifyOptions::new(&[1, 2, 4], 2)).unwrap();
        assert_eq!(report.worlds.len(), 3, "{case}");
        for world in &report.worlds {
            assert_eq!(world.promise, "equal bits (D2)", "{case}");
            assert!(world.failures.is_empty(), "{case}, world {}: {:#?}", world.world, world.failures);
        }
    }
}

/// Where two ranks share samples, in two chunks, every family has the bits of one rank.
#[test]
fn every_family_is_bitwise_equal_on_a_context_axis() {
    // Cases for padding have another embedding and nothing else.
    for (case, layer) in cases().into_iter().filter(|(case, _)| !case.ends_with("-padding")) {
        let dir = tempfile::tempdir().unwrap();
        let text = golden(&case);
        let vocab = HfConfig::parse(&text).unwrap().summary().vocab as u32;
        let wrap = format!("fsdp.wrap=[\"{layer}\"]");
        let chunks = ["data.seq_len=8", "fsdp.chunks={ context = 2 }", &wrap];
        let job = job(&text, config(dir.path(), vocab, &chunks));
        let mesh = |context| Mesh::new([(Axis::Shard, 2), (Axis::Context, context)]).unwrap();
        let worlds = [1, 2].map(|context| Ranks::On(mesh(context))).into();
        let options = VerifyOptions { worlds, ..VerifyOptions::new(&[], 2) };
        let report = verify(&job, &threads(), &options).unwrap_or_else(|error| panic!("{case}: {error}"));
        assert_eq!(report.worlds.len(), 2, "{case}: {:?}", report.skipped);
        for world in &report.worlds {
            assert_eq!(world.promise, "equal bits (D2)", "{case}");
            assert!(world.failures.is_empty(), "{case}, world {}: {:#?}", world.world, world.failures);
            assert_eq!(world.losses, report.worlds[0].losses, "{case}");
        }
    }
}
