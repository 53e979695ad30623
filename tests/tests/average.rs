//! Gradients that are averaged over ranks rather than summed.

use fsdp_core::comm::ReduceOp;
use fsdp_core::engine::ProgramOrder;
use fsdp_train::verify::{VerifyOptions, verify};

use crate::runs::{RankOutcome, train};
use crate::support::{LLAMA, config, job, threads};

/// Trains a small Llama for three steps; also returns how many buffers of [`RankOutcome::shards`] are gradients.
fn trained(op: &str, overrides: &[&str]) -> (Vec<RankOutcome>, usize) {
    let dir = tempfile::tempdir().unwrap();
    let op = format!("fsdp.reduce_op={op}");
    let all = [&["fsdp.wrap=[\"LlamaDecoderLayer\"]", "train.grad_clip=0.1", &op], overrides].concat();
    let jobs = [job(LLAMA, config(dir.path(), 61, &all))];
    let layout = &jobs[0].plan.layout;
    let gradients = layout.units.iter().map(|unit| unit.trainable_segments().count()).sum();
    (train(&jobs, &threads(), 3, |_| Box::new(ProgramOrder)).unwrap(), gradients)
}

#[test]
fn power_of_two_average_trains_bitwise_like_sum() {
    for (ranks, more) in [
        (2, &["fsdp.reduce_dtype=f32"][..]),
        (4, &["fsdp.reduce_dtype=bf16", "fsdp.param_dtype=bf16"]),
        (4, &["fsdp.mesh={ replicate = 2 }", "fsdp.accumulation=unsharded"]),
        (4, &["fsdp.mesh={ replicate = 4 }", "fsdp.offload=cpu"]),
        (8, &["fsdp.mesh={ replicate = 2 }", "train.optimizer={ name = \"sgd\", lr = 1e-1 }"]),
    ] {
        let ranks_are = format!("run.ranks={ranks}");
        let overrides = [&[ranks_are.as_str()], more].concat();
        let (summed, gradients) = trained("sum", &overrides);
        let (averaged, _) = trained("average", &overrides);
        for (sum, average) in summed.iter().zip(&averaged) {
            assert_eq!(sum.reports, average.reports, "losses and norms, {overrides:?}");
            let (sums, state) = sum.shards.split_at(gradients);
            let (averages, averaged_state) = average.shards.split_at(gradients);
            assert!(!sums.is_empty() && sums.iter().flatten().any(|&bits| f64::from_bits(bits) != 0.0));
            for (sum, average) in sums.iter().flatten().zip(averages.iter().flatten()) {
                let divided = f64::from_bits(*sum) / f64::from(ranks);
                assert_eq!(divided.to_bits(), *average, "gradients, {overrides:?}");
            }
            assert_eq!(state, averaged_state, "parameters and optimizer state, {overrides:?}");
        }
    }
}

#[test]
fn averages_stay_within_derived_bounds() {
    for (dtype, worlds, more) in [
        ("f32", &[1, 2, 3, 4, 6][..], "fsdp.mesh={ replicate = 1 }"),
        ("bf16", &[1, 2, 3, 4, 6], "fsdp.mesh={ replicate = 1 }"),
        ("f64", &[3, 4], "fsdp.accumulation=unsharded"),
        ("f32", &[3, 6], "fsdp.mesh={ replicate = 3 }"),
        ("bf16", &[2, 4, 6], "fsdp.mesh={ replicate = 2 }"),
        ("bf16", &[4], "fsdp.accumulation_order=running"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let overrides = [
            "fsdp.wrap=[\"LlamaDecoderLayer\"]",
            "fsdp.reduce_op=average",
            "train.global_batch_size=24",
            &format!("fsdp.reduce_dtype={dtype}"),
            &format!("run.ranks={}", worlds[worlds.len() - 1]),
            more,
        ];
        let job = job(LLAMA, config(dir.path(), 61, &overrides));
        assert_eq!(job.plan.policy.reduce_op, ReduceOp::Average);
        let report = verify(&job, &threads(), &VerifyOptions::new(worlds, 2)).unwrap();
        assert_eq!(report.worlds.len(), worlds.len(), "{:?}", report.skipped);
        for world in &report.worlds {
            assert!(world.failures.is_empty(), "world {}: {:#?}", world.world, world.failures);
            assert_eq!(world.promise, "derived bounds");
        }
    }
}

#[test]
fn only_single_rank_average_matches_oracle_bitwise() {
    let dir = tempfile::tempdir().unwrap();
    let overrides = ["fsdp.wrap=[\"LlamaDecoderLayer\"]", "fsdp.reduce_op=average"];
    let job = job(LLAMA, config(dir.path(), 61, &overrides));
    let report = verify(&job, &threads(), &VerifyOptions::new(&[1, 2], 2)).unwrap();
    let promises: Vec<_> = report.worlds.iter().map(|world| world.promise).collect();
    assert_eq!(promises, ["equal bits (D2)", "derived bounds"]);
    assert!(report.worlds.iter().all(|world| world.failures.is_empty()));
}
