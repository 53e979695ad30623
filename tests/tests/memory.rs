//! Compares the counters of real memory with the ledger, which has only seen shapes, and checks that planted leaks
//! and temporaries are detected.

use fsdp_core::memory::Category;
use fsdp_nn::model::{Mlp, MlpConfig};
use fsdp_train::verify::{VerifyOptions, WorldReport, verify};

use crate::planted::{self, Deed};
use crate::runs::train;
use crate::support::{GPT2, LLAMA, config, job, job_of, options, threads};

fn of(world: &WorldReport, category: &str) -> (usize, usize) {
    at(world, "device", category)
}

fn at(world: &WorldReport, place: &str, category: &str) -> (usize, usize) {
    let mut lines = world.memory.iter().filter(|line| line.place == place);
    let line = lines.find(|line| line.category == category).expect("all categories are listed");
    (line.predicted_bytes, line.counted_bytes)
}

#[test]
fn ledger_prediction_is_byte_exact_for_every_category() {
    let all = ["fsdp.wrap=[\"LlamaDecoderLayer\"]", "train.optimizer={ name = \"adamw\" }"];
    let configurations: [(&str, &[&str], &[&str]); 14] = [
        (LLAMA, &[], &["activations", "workspace", "unsharded slots", "gradient slots", "optimizer state"]),
        (LLAMA, &["fsdp.activation_checkpointing=\"full\""], &["activations"]),
        (LLAMA, &["fsdp.activation_checkpointing=\"selective\""], &["activations"]),
        (LLAMA, &["fsdp.reshard_after_forward=false", "fsdp.forward_prefetch=3"], &["unsharded slots"]),
        (LLAMA, &["fsdp.reshard_after_forward=2"], &["unsharded slots"]),
        (LLAMA, &["fsdp.accumulation=\"unsharded\""], &["accumulators", "gradient slots"]),
        (LLAMA, &["fsdp.accumulation_order=\"running\"", "fsdp.mesh={ replicate = 2 }"], &["accumulators"]),
        (LLAMA, &["fsdp.param_dtype=\"bf16\"", "fsdp.frozen=[\"mlp\"]"], &["parameter shards"]),
        (
            LLAMA,
            &["fsdp.param_dtype=\"f16\"", "train.loss_scale.init=256"],
            &["parameter shards", "activations"],
        ),
        (LLAMA, &["fsdp.offload=\"cpu\""], &["host copy staging", "accumulators"]),
        (LLAMA, &["fsdp.offload=\"cpu\"", "train.global_batch_size=8"], &["host copy staging"]),
        (
            LLAMA,
            &["fsdp.offload=\"cpu\"", "fsdp.accumulation=\"unsharded\"", "fsdp.param_dtype=\"bf16\""],
            &["host copy staging", "accumulators"],
        ),
        (LLAMA, &["train.optimizer={ name = \"adafactor\" }"], &["optimizer state", "communication staging"]),
        (
            LLAMA,
            &[
                "train.optimizer={ name = \"muon\" }",
                "fsdp.param_dtype=\"bf16\"",
                "fsdp.accumulation=\"unsharded\"",
            ],
            &["optimizer state", "gradient slots", "workspace"],
        ),
    ];
    for (model, overrides, used) in configurations {
        let dir = tempfile::tempdir().unwrap();
        let job = job(model, config(dir.path(), 61, &[&all[..], overrides].concat()));
        let report = verify(&job, &threads(), &VerifyOptions::new(&[4], 2)).unwrap();
        let world = &report.worlds[0];
        assert!(world.failures.is_empty(), "{overrides:?}: {:#?}", world.failures);
        let owned = ["parameter shards", "sharded gradients"];
        let place = if overrides.contains(&"fsdp.offload=\"cpu\"") { "host" } else { "device" };
        let owned = owned.map(|category| (place, category));
        let on_device = used.iter().chain(&["total"]).map(|category| ("device", *category));
        for (place, category) in owned.into_iter().chain(on_device) {
            let (predicted, counted) = at(world, place, category);
            assert!(predicted == counted && counted > 0, "{overrides:?}, {category}: {predicted}, {counted}");
        }
    }
}

/// Checks the number of elements that a rank holds, for parameters whose rows divide evenly.
#[test]
fn shard_slot_and_state_sizes_match_formula() {
    let dir = tempfile::tempdir().unwrap();
    let sizes = MlpConfig { vocab: 32, widths: vec![16; 4], bias: false, tied: false, std: 0.2 };
    let overrides =
        ["fsdp.wrap=[\"MlpLayer\"]", "train.optimizer={ name = \"adamw\" }", "fsdp.forward_prefetch=0"];
    let job = job_of(Mlp::new(&sizes).unwrap(), config(dir.path(), 32, &overrides));
    let report = verify(&job, &threads(), &VerifyOptions::new(&[1, 2, 4, 8], 2)).unwrap();
    assert!(report.holds());
    let (root, layer) = (2 * 32 * 16 * 4, 16 * 16 * 4);
    for world in &report.worlds {
        let shard = (root + 3 * layer) / world.world;
        assert_eq!(of(world, "parameter shards").1, shard);
        assert_eq!(of(world, "sharded gradients").1, shard);
        assert_eq!(of(world, "optimizer state").1, 2 * shard, "two moments");
        // The root, the layer in use, and at most one that backward prefetches.
        let slots = of(world, "unsharded slots").1;
        assert!((root + layer..=root + 2 * layer).contains(&slots), "{slots}");
    }
}

fn planted(block: usize, deed: Deed) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let model = Mlp::new(&planted::mlp()).unwrap();
    let job = job_of(model, config(dir.path(), 7, &["fsdp.wrap=[\"MlpLayer\"]"]));
    let ranks = planted::ranks(options(), block, move |_| deed);
    let report = verify(&job, &ranks, &VerifyOptions::new(&[2], 3)).unwrap();
    report.worlds[0].failures.clone()
}

#[test]
fn planted_leak_fails_verification() {
    assert_eq!(planted(1, Deed::Nothing), [""; 0]);
    for block in 0..4 {
        let failures = planted(block, Deed::LeakFrom(0, Category::Activation));
        let has_failure = |what: &str| failures.iter().any(|failure| failure.contains(what));
        assert!(
            has_failure("activations: ") && has_failure("live activations were"),
            "block {block}: {failures:#?}"
        );
    }
    // The oracle and the first step of both ranks make 3 * 8 + 8 calls.
    let failures = planted(2, Deed::LeakFrom(32, Category::Workspace));
    assert!(failures.iter().any(|failure| failure.contains("live workspace were")), "{failures:#?}");
}

#[test]
fn planted_temporary_fails_verification() {
    for (category, name) in [(Category::Workspace, "workspace: "), (Category::Activation, "activations: ")] {
        for block in 0..4 {
            let failures = planted(block, Deed::Temporary(category, 10_000));
            assert!(failures.iter().any(|failure| failure.starts_with(name)), "block {block}: {failures:#?}");
        }
    }
    // One element more than planned, at the peak.
    let failures = planted(3, Deed::Temporary(Category::CommStaging, 1));
    assert!(failures.iter().any(|failure| failure.starts_with("communication staging: ")), "{failures:#?}");
}

#[test]
fn memory_is_constant_after_first_step() {
    for (model, vocab, wrap) in [(LLAMA, 61, "LlamaDecoderLayer"), (GPT2, 53, "GPT2Block")] {
        for accumulation in ["reduce", "unsharded"] {
            let dir = tempfile::tempdir().unwrap();
            let overrides =
                [format!("fsdp.wrap=[\"{wrap}\"]"), format!("fsdp.accumulation=\"{accumulation}\"")];
            let config = config(dir.path(), vocab, &[&overrides[0], &overrides[1]]);
            let jobs = [job(model, config)];
            let ranks = train(&jobs, &threads(), 6, |_| Box::new(fsdp_core::engine::ProgramOrder)).unwrap();
            for usage in ranks.iter().map(|rank| &rank.usage) {
                let flat = |later: &fsdp_core::memory::Usage| (later.device, later.host, later.allocations);
                assert!(usage.iter().all(|later| flat(later) == flat(&usage[0])), "{usage:?}");
            }
        }
    }
}
