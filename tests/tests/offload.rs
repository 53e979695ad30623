//! CPU offload: the same bits as without it, with less device memory.

use fsdp_core::Rank;
use fsdp_core::engine::{IssueOrder, ProgramOrder};
use fsdp_core::memory::{Category, Usage};
use fsdp_core::schedule::OpKind;
use fsdp_nn::HostMemory;
use fsdp_nn::model::{Mlp, MlpConfig};
use fsdp_sim::SeededOrder;
use fsdp_train::verify::{VerifyOptions, verify};

use crate::runs::{RankOutcome, train};
use crate::support::{GPT2, LLAMA, config, job, job_of, threads};

/// Runs three steps; also returns the number of copies between device and host per step.
fn run(model: &str, offload: &str, overrides: &[&str], seed: Option<u64>) -> (Vec<RankOutcome>, usize) {
    let dir = tempfile::tempdir().unwrap();
    let (vocab, wrap) = match model {
        LLAMA => (61, "fsdp.wrap=[\"LlamaDecoderLayer\"]"),
        _ => (53, "fsdp.wrap=[\"GPT2Block\"]"),
    };
    let offload = format!("fsdp.offload=\"{offload}\"");
    let all = [&[wrap, &*offload], overrides].concat();
    let jobs = [job(model, config(dir.path(), vocab, &all))];
    let order = |rank: Rank| -> Box<dyn IssueOrder> {
        match seed {
            Some(seed) => Box::new(SeededOrder::for_rank(seed, rank.0)),
            None => Box::new(ProgramOrder),
        }
    };
    let copies = |kind: &OpKind| matches!(kind, OpKind::Upload(_) | OpKind::Download(_));
    let copies = jobs[0].plan.step.ops.iter().filter(|op| copies(&op.kind)).count();
    (train(&jobs, &threads(), 3, order).unwrap(), copies)
}

/// Settings of a case besides the mesh; a step has 16 micro-batches.
const POLICIES: [&[&str]; 6] = [
    &["train.grad_clip=0.05"],
    &["fsdp.reshard_after_forward=true", "fsdp.forward_prefetch=2", "fsdp.backward_prefetch=0"],
    &["fsdp.accumulation=\"unsharded\"", "fsdp.reshard_after_forward=false"],
    &["fsdp.param_dtype=\"bf16\"", "fsdp.activation_checkpointing=\"selective\""],
    &["fsdp.accumulation_order=\"running\"", "train.optimizer={ name = \"sgd\", lr = 1e-1, momentum = 0.9 }"],
    &["train.optimizer={ name = \"adafactor\" }", "fsdp.reduce_dtype=\"bf16\""],
];

#[test]
fn offload_is_bitwise_equal_at_any_mesh() {
    for (index, policy) in POLICIES.iter().enumerate() {
        for (ranks, replicas) in [(1, 1), (2, 1), (4, 1), (4, 2), (8, 2), (16, 1)] {
            let mesh = [
                "train.micro_batch_size=1",
                "train.global_batch_size=16",
                &format!("run.ranks={ranks}"),
                &format!("fsdp.mesh={{ replicate = {replicas} }}"),
            ];
            let overrides = [&mesh[..], policy].concat();
            let model = if index % 2 == 0 { LLAMA } else { GPT2 };
            let (plain, none) = run(model, "none", &overrides, None);
            assert_eq!(none, 0);
            for seed in [None, Some(3), Some(ranks + index as u64)] {
                let (offloaded, copies) = run(model, "cpu", &overrides, seed);
                assert!(copies > 0);
                for (offloaded, plain) in offloaded.iter().zip(&plain) {
                    assert_eq!(offloaded.reports, plain.reports, "{overrides:?}");
                    assert_eq!(offloaded.shards, plain.shards, "{overrides:?}");
                    assert_eq!(offloaded.traffic, plain.traffic, "{overrides:?}");
                }
            }
        }
    }
}

#[test]
fn offload_verifies_with_groups_frozen_and_tied_parameters() {
    let cases: [(&str, u32, &[&str]); 4] = [
        (LLAMA, 61, &["fsdp.reshard_after_forward=2", "fsdp.wrap=[\"LlamaDecoderLayer\"]"]),
        (LLAMA, 61, &["fsdp.frozen=[\"mlp\", \"embed\"]", "fsdp.wrap=[\"LlamaMLP\"]"]),
        (GPT2, 53, &["fsdp.wrap=[\"GPT2Block\"]", "fsdp.mesh={ replicate = 2 }", "fsdp.forward_prefetch=3"]),
        (GPT2, 53, &["fsdp.wrap=[]", "fsdp.accumulation=\"unsharded\""]),
    ];
    for (model, vocab, overrides) in cases {
        let dir = tempfile::tempdir().unwrap();
        let all = [&["fsdp.offload=\"cpu\"", "train.grad_clip=0.1"][..], overrides].concat();
        let job = job(model, config(dir.path(), vocab, &all));
        let report = verify(&job, &threads(), &VerifyOptions::new(&[2, 4, 8], 2)).unwrap();
        assert!(report.worlds.len() >= 2, "{:?}", report.skipped);
        for world in &report.worlds {
            assert_eq!(world.promise, "equal bits (D2)");
            assert!(world.failures.is_empty(), "{overrides:?}: {:#?}", world.failures);
        }
    }
}

/// The device no longer holds what the host holds, except for the slots used for transfers.
#[test]
fn offload_moves_shards_gradients_and_state_to_host() {
    let moved = [Category::ParameterShard, Category::ShardedGradient, Category::OptimizerState];
    for overrides in [&["fsdp.reshard_after_forward=true"][..], &["fsdp.param_dtype=\"bf16\""]] {
        let one_round = ["run.ranks=4", "train.micro_batch_size=1", "train.global_batch_size=4"];
        let overrides = [&one_round[..], overrides].concat();
        let usage = |offload| -> Vec<Usage> {
            run(LLAMA, offload, &overrides, None).0.iter().map(|rank| *rank.usage.last().unwrap()).collect()
        };
        for (plain, offloaded) in usage("none").into_iter().zip(usage("cpu")) {
            assert_eq!(plain.host.total_peak_bytes, 0);
            let mut freed = 0;
            for category in Category::ALL {
                let is_moved = moved.contains(&category);
                let (before, after, on_host) =
                    (plain.peak(category), offloaded.peak(category), offloaded.host.peak(category));
                let expected = if is_moved { (0, before) } else { (before, 0) };
                if category != Category::HostStaging {
                    assert_eq!((after, on_host), expected, "{category}");
                }
                freed += on_host;
            }
            let staging = offloaded.peak(Category::HostStaging);
            assert_eq!(plain.peak(Category::HostStaging), 0);
            assert!(0 < staging && staging < freed, "{staging} of {freed}");
            assert_eq!(offloaded.device.total_peak_bytes, plain.device.total_peak_bytes - freed + staging);
        }
    }
}

/// Staging holds only the units in flight, not the model: the root and one prefetched unit.
#[test]
fn staging_size_is_independent_of_layer_count() {
    let staging = |layers: usize| {
        let dir = tempfile::tempdir().unwrap();
        let sizes = MlpConfig { vocab: 32, widths: vec![16; layers + 1], bias: false, tied: false, std: 0.2 };
        let overrides = [
            "fsdp.offload=\"cpu\"",
            "fsdp.wrap=[\"MlpLayer\"]",
            "train.micro_batch_size=1",
            "train.global_batch_size=4",
        ];
        let job = job_of(Mlp::new(&sizes).unwrap(), config(dir.path(), 32, &overrides));
        let usage = job.predict::<HostMemory>(Rank(0)).unwrap();
        let (root, layer) = (2 * 32 * 16 * 4 / 4, 16 * 16 * 4 / 4);
        assert_eq!(usage.host.peak(Category::ParameterShard), root + layers * layer);
        // Uploads: the root, and a layer while the previous one is gathered. Downloads: the root and two layers.
        assert_eq!(usage.peak(Category::HostStaging), (root + 2 * layer) + (root + 2 * layer));
        usage.peak(Category::HostStaging)
    };
    assert_eq!(staging(4), staging(40));
}
